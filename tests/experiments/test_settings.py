"""Settings: what is filled in, what is refused and how, what a list means, what names a run."""

import contextlib
import itertools
import random
import string
import subprocess
import sys
import tomllib
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgma.aggregation.rules import RULES
from fedgma.cli.show_settings import show_settings
from fedgma.errors import ConfigError
from fedgma.experiments.grid import check, every_name, expand, read_grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import Settings, complete, record
from fedgma.experiments.settings.recorded import RULE_SETTINGS, USED
from fedgma.experiments.settings.run import MODELS
from fedgma.experiments.spec_parts import optimizer_of
from fedgma.records.format import fingerprint
from fedgma.simulation.algorithms import ALGORITHMS


def fingerprints(grid):
    return {fingerprint(record(settings)) for settings in grid.runs}


def test_nothing_at_all_compares_the_mean_with_gma_on_five_seeds():
    grid = read_grid()
    assert [(run.aggregator, run.seed) for run in grid.runs] == list(itertools.product(["mean", "gma"], range(5)))
    run = grid.runs[0]
    assert (run.dataset, run.model, run.algorithm) == ("fmnist-mini", "lenet", "fedavg")
    assert (run.partition.clients, run.partition.classes_per_client, run.clients_per_round) == (100, 2, 10)


@pytest.mark.parametrize(
    ("dataset", "model", "epochs", "classes"),
    [("mnist", "lenet", 1, 2), ("cifar100", "resnet18-gn", 3, 10), ("tinyimagenet", "resnet18-gn", 12, 20)],
)
def test_defaults_are_those_of_the_paper_for_the_data_set(dataset, model, epochs, classes):
    run = complete(Settings(dataset=dataset))
    assert (run.model, run.local_epochs, run.partition.classes_per_client) == (model, epochs, classes)
    assert (run.tau, run.momentum, run.beta1, run.beta2, run.epsilon) == (0.4, 0.9, 0.9, 0.99, 1e-3)


def test_known_models_are_those_that_can_be_built():
    from fedgma.training.models import MODELS as BUILT

    assert sorted(BUILT) == sorted(MODELS)


def test_names_that_settings_repeat_to_do_without_torch_are_those_of_the_code():
    from fedgma.data.augmentations import AUGMENTATIONS
    from fedgma.experiments.settings.task import TASKS as TASK_NAMES
    from fedgma.simulation.spec import WEIGHTINGS
    from fedgma.training.local_steps import OPTIMIZERS
    from fedgma.training.tasks import TASKS

    assert tuple(TASKS) == TASK_NAMES
    lists = {"augment": AUGMENTATIONS, "weighting": WEIGHTINGS, "client_optimizer": OPTIMIZERS}
    assert {name: get_args(Settings.model_fields[name].annotation) for name in lists} == lists


def test_algorithms_name_server_optimisers_that_exist():
    from fedgma.aggregation.optimizers import FORMULAS

    assert {row.server for row in ALGORITHMS.values()} == set(FORMULAS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_made_from_its_own_settings_and_no_other_is_recorded(name):
    row, settings = ALGORITHMS[name], complete(Settings(algorithm=name))
    assert row.read(settings) == row.make()
    own = {key for key in ("mu", "alpha", "beta", "lambda_", "rho") if record(settings)[key] is not None}
    assert own == row.settings.keys()


def test_settings_of_an_algorithm_are_given_as_words_and_checked():
    runs = read_grid(None, ["algorithm=feddyn,fedcm,fedavg", "alpha=0.2", "aggregator=mean", "seed=0"]).runs
    assert [ALGORITHMS[run.algorithm].read(run).mu for run in runs] == [0.2, 0.0, 0.0]
    assert [record(run)["alpha"] for run in runs] == [0.2, 0.2, None]
    assert optimizer_of(complete(Settings(algorithm="fedacg", lambda_=0.6))).settings["beta1"] == 0.6
    for words, said in (
        (["algorithm=fedcm", "alpha=2.0"], "alpha must be above 0 and at most 1, got 2.0"),
        (["algorithm=fedavg", "rho=0.1"], "rho is given but no run uses it"),
        (["algorithm=mofedsam", "client_optimizer=adamw"], "mofedsam reads the clients' mean gradient"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_grid(None, words)


def test_every_conditional_setting_is_a_setting():
    assert set(USED) <= set(every_name())


def test_lists_multiply_and_seeds_stand_together():
    grid = expand(
        {"algorithm": ["fedavg", "fedyogi"], "seed": [5, 6], "partition": {"alpha": [0.1, 1.0], "name": "dirichlet"}}
    )
    assert len(grid.runs) == 2 * 2 * 2 * 2
    assert grid.axes == ("aggregator", "algorithm", "partition.alpha", "seed")
    assert [run.seed for run in grid.runs[:4]] == [5, 6, 5, 6]
    assert {run.server_learning_rate for run in grid.runs} == {1.0, 0.01}


def test_partitions_can_be_listed_by_name_or_as_tables():
    grid = expand({"partition": ["iid", {"name": "dirichlet", "alpha": 0.1}], "seed": 0, "aggregator": "gma"})
    assert [run.partition.name for run in grid.runs] == ["iid", "dirichlet"]
    assert grid.axes == ("partition",)


def test_a_tau_that_the_mean_does_not_use_makes_no_second_run():
    grid = read_grid(None, ["tau=0.2,0.4,0.6", "seed=0"])
    assert [(run.aggregator, run.tau) for run in grid.runs] == [("mean", 0.2), ("gma", 0.2), ("gma", 0.4), ("gma", 0.6)]


def test_words_take_the_place_of_what_the_file_says(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('rounds = 7\npartition = { name = "dirichlet", alpha = 0.1 }\n')
    run = read_grid(file, ["partition.alpha=3", "algorithm=fedyogi"]).runs[0]
    assert (run.rounds, run.partition.alpha, run.algorithm, run.partition.name) == (7, 3, "fedyogi", "dirichlet")


def test_a_number_may_begin_or_end_with_its_point():
    runs = read_grid(None, ["tau=.2,.4", "client_learning_rate=1.", "aggregator=gma", "seed=0"]).runs
    assert [(run.tau, run.client_learning_rate) for run in runs] == [(0.2, 1.0), (0.4, 1.0)]


def test_what_is_shown_is_a_settings_file_of_the_same_runs(tmp_path):
    grid = read_grid(None, ["algorithm=fedprox,fedyogi", "mu=0.1", "tau=0.2,0.4"])
    shown = show_settings(grid)
    file = tmp_path / "shown.toml"
    file.write_text(shown)
    assert fingerprints(read_grid(file)) == fingerprints(grid)
    for dotted in every_name():
        assert f"{dotted.rsplit('.', 1)[-1]} = " in shown, dotted


def test_the_fingerprint_knows_nothing_of_folders_but_of_everything_else():
    first, second = (
        record(complete(Settings(dataset=f"{path}/mine.npz", model=f"{path}/net.py:Net"))) for path in ("a", "/b")
    )
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first, {"data": "1"}) != fingerprint(first, {"data": "2"})
    base = complete(Settings(algorithm="fedyogi"))
    for name, value in {
        "tau": 0.6,
        "seed": 3,
        "rounds": 7,
        "beta2": 0.9,
        "batch_size": 8,
        "augment": "crop_flip",
    }.items():
        other = base.model_copy(update={name: value})
        assert fingerprint(record(base)) != fingerprint(record(other)), name


def test_a_run_without_augmentation_records_none():
    assert "augment" not in record(complete(Settings()))
    assert record(complete(Settings(augment="crop_flip")))["augment"] == "crop_flip"


def test_a_settings_file_may_begin_with_a_mark_and_end_its_lines_as_on_windows(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\r\nseed = 0\r\n")
    assert {run.rounds for run in read_grid(tmp_path / "mine.toml").runs} == {7}


def test_a_word_may_hold_a_range_of_whole_numbers_with_both_ends():
    def seeds(word):
        return sorted({run.seed for run in read_grid(None, ["aggregator=mean", word]).runs})

    assert seeds("seed=0..3") == [0, 1, 2, 3]
    assert seeds("seed=0..2,7") == seeds("seed=[0..2, 7]") == [0, 1, 2, 7]
    assert seeds("seed=5..5") == [5]
    for word in ("seed=3..0", "seed=0..99999999999"):
        with pytest.raises(ConfigError, match=r"expected a range from a number up to a larger one"):
            seeds(word)
    for path in ("../0..3/mine.npz", "0..3.npz", "a0..3"):  # names of files are no ranges
        assert read_grid(None, [f"dataset=./{path}.npz", "seed=0", "aggregator=mean"]).runs[0].dataset.endswith(".npz")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tau": 1.5}, "tau: input should be less than or equal to 1, got 1.5"),
        ({"tau": "0.4"}, "tau: expected a number, got '0.4'"),
        ({"tau": True}, "tau: expected a number, got True"),
        ({"rounds": 2.0}, "rounds: expected a whole number, got 2.0"),
        ({"rounds": 0}, "rounds: input should be greater than or equal to 1, got 0"),
        ({"client_learning_rate": float("nan")}, "client_learning_rate: input should be a finite number, got nan"),
        ({"clients": 10}, "unknown setting 'clients'; did you mean 'partition.clients'?"),
        ({"lr": 0.1}, "unknown setting 'lr'; did you mean 'client_learning_rate'?"),
        ({"aggregator": "fedavg"}, "got 'fedavg'; fedavg is an algorithm"),
        ({"dataset": "z\udcfcri.npz"}, "dataset: expected UTF-8 text, got bytes of another encoding; rename the file"),
        ({"aggregator": "gmaa"}, "got 'gmaa'; did you mean 'gma'?"),
        ({"aggregator": "GMA"}, "got 'GMA'; did you mean 'gma'?"),
        ({"model": "LeNet"}, "or your own as 'file.py:Name'; did you mean 'lenet'?"),
        ({"dataset": "MNIST"}, "such as './MNIST'; did you mean 'mnist'?"),
        ({"seed": "0-9"}, "seed: expected a whole number, got '0-9'; write 0..9 for all of these"),
        ({"partition": {"nmae": "iid"}}, "unknown setting 'partition.nmae'; did you mean 'partition.name'?"),
        ({"aggregator": "mean", "tau": 0.3}, "tau is given but no run uses it"),
        ({"mu": 0.1}, "mu is given but no run uses it"),
        (
            {"clients_per_round": 11, "partition": {"clients": 10}},
            "clients_per_round: expected at most partition.clients = 10, got 11",
        ),
        ({"seed": []}, "seed: expected at least one value, got an empty list"),
        ({"seed": [1, 1]}, "seed: 1 is in the list twice"),
        ({"seed": [[1], 2]}, "seed: expected a list of values, got a list inside a list"),
        ({"seed": list(range(400)), "tau": [i / 400 for i in range(400)]}, "the lists multiply to 320000 runs"),
        ({"partition": 3}, "partition: "),
        ({"dataset": "a\nb"}, r"or folder, such as './a\nb'"),
        ({"dataset": "fmnst"}, "dataset: unknown data set 'fmnst'; known: "),
        ({"dataset": "fedcmnist", "shift": "none"}, "shift.name = 'none'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(given, said):
    with pytest.raises(ConfigError) as caught:
        expand(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


VALID = """\
dataset = "fmnist-mini"
model = "logistic"
algorithm = ["fedavg", "fedyogi", "fedprox"]
aggregator = ["mean", "gma"]
tau = 0.4
mask_position = "after"
rounds = 3
clients_per_round = 4
local_epochs = 1
local_steps = 2
batch_size = 32
client_learning_rate = 0.05
momentum = 0.9
gradient_clip = 1.0
mu = 0.01
server_learning_rate = 0.5
beta1 = 0.9
beta2 = 0.99
epsilon = 0.001
seed = [0, 1]
evaluate_every = 1
client_test_size = 50
mask_every = 5

[partition]
name = "dirichlet"
clients = 20
alpha = 0.5
min_size = 5
"""


def edited(word, rng):
    """A word with one character left out, put in, changed or swapped with its neighbour."""
    at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase + "_")
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + letter + word[at:]
    if kind == 2:
        return word[:at] + letter + word[at + 1 :]
    return word[:at] + word[at : at + 2][::-1] + word[at + 2 :]


def typos(count, seed=0):
    """Settings files with one wrong character, in a key or in a word that is a name: (key, wrong, text)."""
    rng = random.Random(seed)
    lines = VALID.splitlines()
    names = {'"fmnist-mini"', '"logistic"', '"fedyogi"', '"gma"', '"after"', '"dirichlet"'}
    spots = [(n, line.split(" = ")[0], False) for n, line in enumerate(lines) if " = " in line]
    spots += [(n, word.strip('"'), True) for n, line in enumerate(lines) for word in names if word in line]
    while count:
        place, word, is_value = spots[rng.randrange(len(spots))]
        wrong = edited(word, rng)
        if wrong == word or not wrong or (is_value and wrong in ("fmnist", "mnist")):
            continue
        key = lines[place].split(" = ")[0]
        line = lines[place].replace(f'"{word}"', f'"{wrong}"') if is_value else lines[place].replace(word, wrong, 1)
        count -= 1
        yield key, word, wrong, is_value, "\n".join([*lines[:place], line, *lines[place + 1 :]])


def test_the_settings_that_the_typos_are_made_of_are_valid():
    assert len(expand(tomllib.loads(VALID)).runs) == 2 * 3 * 2


def test_two_hundred_typos_are_each_refused_by_name_and_most_with_the_right_hint(tmp_path):
    file, hinted, in_keys = tmp_path / "s.toml", 0, 0
    for key, word, wrong, is_value, text in typos(200):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_grid(file)
        said = str(caught.value)
        assert (key if is_value else wrong) in said, (text, said)
        if not is_value:
            in_keys += 1
            hinted += f"{word}'" in said
    assert hinted >= 0.9 * in_keys


def test_the_command_line_says_a_typo_in_one_line_and_exits_with_2(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("tua = 0.4\n")
    code = "from fedgma.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run", str(file)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "fedgma: unknown setting 'tua'; did you mean 'tau'?\n"


@pytest.mark.parametrize(
    "text", ["tau 0.4", "tau = ", "[partition", "tau = 0.4\ntau = 0.5", "a = " + "[" * 5000, '"', "x = 0x"]
)
def test_a_broken_file_is_one_sentence_with_the_line(tmp_path, text):
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"s\.toml is not TOML"):
        read_grid(file)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"dataset = '\xff'")
    for name, said in (("nowhere.toml", "No such file"), (".", "directory"), ("latin.toml", "not UTF-8")):
        with pytest.raises(ConfigError, match=said):
            read_grid(tmp_path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Settings.model_fields, "x"]), JSON, max_size=4))
def test_any_settings_are_runs_or_one_sentence(given_settings):
    runs = ()
    with contextlib.suppress(ConfigError):  # anything else is a traceback for the user
        runs = expand(given_settings).runs
    assert all(isinstance(run, Settings) for run in runs)


@given(st.text(max_size=12))
def test_any_word_is_settings_or_one_sentence(word):
    runs = ()
    with contextlib.suppress(ConfigError):
        runs = read_grid(None, [word]).runs
    assert all(isinstance(run, Settings) for run in runs)


def test_one_run_can_be_checked_alone():
    assert check({"partition": "iid"}).partition.name == "iid"


def test_every_setting_of_a_rule_can_be_set():
    assert set(RULE_SETTINGS) <= set(Settings.model_fields)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_library_is_made_from_settings(name):
    settings = complete(Settings(aggregator=name, seed=3))
    rule = Materials("cpu").rule(settings)
    assert rule.name == name
    assert dict(rule.settings) == {key: getattr(settings, key) for key in rule.settings}


def test_a_clipped_rule_is_made_from_settings():
    assert Materials("cpu").rule(complete(Settings(aggregator="median", update_clip=0.5))).settings["norm"] == 0.5


def test_a_pattern_that_is_the_name_of_no_array_is_refused():
    (run,) = expand({"aggregator": "gma", "unmasked": "output.*", "seed": 0}).runs
    with pytest.raises(ConfigError, match=r"the model has no array 'output\.\*'; it has conv1\.weight, .*"):
        Materials("cpu").rule(run)


def test_arrays_without_a_mask_are_named_by_a_setting_that_the_mean_does_not_have():
    grid = expand({"aggregator": ["mean", "gma"], "unmasked": "fc3.*", "seed": 0})
    rules = [Materials("cpu").rule(run) for run in grid.runs]
    assert [rule.name for rule in rules] == ["mean", "unmasked_gma"]
    before = expand({"aggregator": "mean", "seed": 0}).runs[0]
    assert fingerprint(record(grid.runs[0])) == fingerprint(record(before))
    updates = {name: np.array([[1.0], [-3.0]]) for name in ("fc2.bias", "fc3.bias")}
    assert {name: mask.tolist() for name, mask in rules[1](updates).mask.items()} == {
        "fc2.bias": [0.0],
        "fc3.bias": [1.0],
    }
