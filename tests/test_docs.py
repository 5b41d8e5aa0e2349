"""The documentation: every page can be reached, the reference names what exists, the quick start's commands run.

The examples of the pages themselves are doctests; `make docs` builds the site and checks its links.
"""

import ast
import doctest
import re
import shlex
from pathlib import Path

import click
from typer.main import get_command

import fedgma
from commands import call
from fedgma.cli.app import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^::: (\S+)\n(?:    options: \{members: \[(.*?)\].*\}\n)?", re.MULTILINE)


def entries():
    """Modules of the reference with the names that it shows; None for all."""
    for page in sorted(DOCS.glob("reference/*.md")):
        for module, members in ENTRY.findall(page.read_text()):
            yield module, members.split(", ") if members else None


def defined(module):
    """The public names that a module's source defines."""
    file = ROOT / "src" / Path(*module.split("."))
    source = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
    body = ast.parse(source.read_text()).body
    return {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"}


def pages():
    """All pages but those that belong to one experiment, which the replication leads to."""
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    return {page for page in found if not re.match(r"replication/[CE]\d", page)}


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/]+\.md", navigation)) == sorted(pages())


def test_the_start_page_leads_to_every_page():
    links = set(re.findall(r"\]\(([\w/]+\.md)", (DOCS / "index.md").read_text()))
    assert {page for page in pages() - links if not page.startswith("replication/")} == {"index.md"}


def test_the_reference_names_what_exists():
    missing = {module: sorted(set(members or ()) - defined(module)) for module, members in entries()}
    assert len(missing) > 20
    assert {module: names for module, names in missing.items() if names} == {}


def test_the_reference_names_nothing_twice():
    shown = [(module, name) for module, names in entries() for name in names or [None]]
    assert sorted(map(str, shown)) == sorted({str(entry) for entry in shown})


def test_the_reference_holds_every_public_name():
    shown = {(module, name) for module, members in entries() for name in members or defined(module)}
    public = {name: getattr(fedgma, name) for name in fedgma.__all__ if not isinstance(getattr(fedgma, name), dict)}
    assert {name for name, value in public.items() if (value.__module__, value.__name__) not in shown} == set()


def test_the_command_of_the_quick_start_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "quick_start.md").read_text()
    names = {}
    for example in doctest.DocTestParser().get_examples(page.partition("np.savez")[0]):
        exec(example.source, names)
    names["np"].savez("mine.npz", x=names["x"], y=names["y"])
    commands = re.findall(r"^\$ fedgma (.*)$", page, re.MULTILINE)
    demo, own, report = commands
    assert (demo, report) == ("run", "report runs --out report")  # slow, and tested elsewhere
    code, printed, said = call(*shlex.split(own))
    assert code == 0, said
    assert "10 run folders in runs" in printed + said


def command_lines():
    """Every `$ fedgma ...` of the documentation, without what stands before and behind it."""
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        for line in re.findall(r"^\$ (?:[A-Z_]+=\S+ )*fedgma (.*)$", page.read_text(), re.MULTILINE):
            yield page.name, shlex.split(line.partition(" #")[0].partition(" | ")[0].partition(" > ")[0])


def test_the_documentation_shows_commands_and_options_that_exist():
    lines, shown = list(command_lines()), 0
    for page, words in lines:
        command = get_command(app)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: {words[0]}"
            command, words = command.commands[words[0]], words[1:]
        try:
            command.make_parser(click.Context(command)).parse_args(list(words))
        except click.UsageError as error:
            raise AssertionError(f"{page}: {words}: {error}") from None
        shown += 1
    assert shown > 40
