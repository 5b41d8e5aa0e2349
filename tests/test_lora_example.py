"""The example of adapters on text, at reduced size: on manual pages where there are some, and on the documentation."""

import gzip
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def lora():
    return load_script(ROOT / "examples" / "lora.py")


def test_the_example_compares_four_arms_and_says_how_far_off_averaging_apart_is(lora, capsys, monkeypatch):
    monkeypatch.setattr(lora, "MANUALS", ROOT / "no such folder")  # the same on every machine
    outcome = lora.main(languages=3, size=1500, steps=25, rounds=1)
    assert sorted(arm.name for arm in outcome.arms) == [
        "adapters apart, GMA",
        "adapters apart, mean",
        "adapters product, GMA",
        "adapters product, mean",
    ]
    printed = capsys.readouterr().out
    assert "parameters travel" in printed
    assert "6 local steps:" in printed


def test_manual_pages_are_read_without_their_layout(lora, tmp_path):
    with gzip.open(tmp_path / "ls.1.gz", "wb") as page:
        page.write(b".TH LS 1\nlist \\fIdirectory\\fP con\\-tents\n'\\\" t\nsort\n")
    assert lora.manual(tmp_path, 100) == b"list directory contents\nsort\n"
    assert lora.manual(tmp_path, 4) == b"list"
