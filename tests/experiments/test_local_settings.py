"""Settings of local training: optimiser, decay and schedules, from a file to a run and into its record."""

from pathlib import Path

import pytest

from fedgma.cli.show_settings import show_settings
from fedgma.errors import ConfigError
from fedgma.experiments.grid import expand, read_grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import Settings, complete, record
from fedgma.experiments.settings.local_training import AXES, OFF, schedule_of
from fedgma.records.format import fingerprint, lineage
from fedgma.statistics.labels import LEFT_OUT
from fedgma.training.schedules import Schedule, factor

ROOT = Path(__file__).parents[2]


def recorded(**settings):
    return record(complete(Settings(**settings)))


# fingerprints of settings from before local training had an optimiser and schedules
BEFORE = {
    "ca446a19bf509d84": {},
    "6543c4b1e5090794": {"algorithm": "scaffold", "aggregator": "mean"},
    "64967e1944bc6b70": {
        "dataset": "cifar10",
        "algorithm": "fedprox",
        "mu": 0.1,
        "momentum": 0.0,
        "gradient_clip": 10.0,
        "augment": "crop_flip",
    },
    "82494d87a466bd63": {"algorithm": "fedadam", "partition": {"name": "iid"}, "attack": {"name": "noise"}},
}


@pytest.mark.parametrize("wanted", BEFORE)
def test_runs_from_before_these_settings_keep_their_fingerprints(wanted):
    assert fingerprint(recorded(**BEFORE[wanted])) == wanted


def test_every_setting_of_local_training_makes_another_run():
    changes = [
        {},
        {"nesterov": True},
        {"weight_decay": 0.1},
        {"label_smoothing": 0.1},
        {"client_optimizer": "adamw"},
        {"client_optimizer": "adamw", "client_beta1": 0.8},
        {"client_optimizer": "adamw", "client_epsilon": 1e-4},
        *({axis: {"name": "cosine"}} for axis in AXES),
        *({axis: {"warm_up": 3}} for axis in AXES),
        {"round_schedule": {"name": "cosine", "floor": 0.1}},
        {"round_schedule": {"name": "exponential", "decay": 0.9}},
    ]
    assert len({fingerprint(recorded(**change)) for change in changes}) == len(changes)


def test_a_run_of_more_rounds_continues_a_shorter_one_only_if_its_rates_are_the_same():
    for schedule, continues in (({"name": "exponential", "decay": 0.99}, True), ({"name": "cosine"}, False)):
        short, long = (lineage(recorded(rounds=rounds, round_schedule=schedule), {}) for rounds in (10, 20))
        assert (short == long) == continues


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"round_schedule": "exponential"}, "round_schedule: 'exponential' needs decay; set round_schedule.decay"),
        ({"step_schedule": {"name": "step", "decay": 0.5}}, "step_schedule: 'step' needs every"),
        ({"round_schedule": {"name": "cosine", "decay": 0.5}}, "round_schedule.decay is given but no run uses it"),
        ({"step_schedule": {"floor": 0.5}}, "step_schedule.floor is given but no run uses it"),
        ({"round_schedule": {"nmae": "step"}}, "did you mean 'round_schedule.name'?"),
        ({"round_schedule": "cosin"}, "did you mean 'cosine'?"),
        ({"round_schedule": {"name": "cosine", "length": 3}, "rounds": 9}, "the learning rate falls to 0"),
        ({"client_beta1": 0.5}, "client_beta1 is given but no run uses it"),
        ({"client_optimizer": "adamw", "momentum": 0.5}, "momentum is given but no run uses it"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov: expected momentum above 0"),
        ({"client_optimizer": "adamw", "algorithm": "scaffold"}, "client_optimizer: scaffold reads the clients' mean"),
        (
            {"label_smoothing": 0.1, "task": "own.py:Task"},
            "for the tasks classification, imbalanced and next_",
        ),
        ({"weight_decay": -1.0}, "weight_decay: input should be greater than or equal to 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_name(given, said):
    with pytest.raises(ConfigError) as caught:
        expand(given)
    assert said in str(caught.value)


def test_what_is_shown_is_a_settings_file_of_the_same_runs(tmp_path):
    words = ["weight_decay=0,0.1", "round_schedule.name=constant,cosine", "step_schedule.warm_up=2", "seed=0"]
    grid = read_grid(None, words)
    assert len(grid.runs) == 2 * 2 * 2
    (tmp_path / "shown.toml").write_text(show_settings(grid))
    again = read_grid(tmp_path / "shown.toml", ["round_schedule.length=200"])
    assert {fingerprint(record(run)) for run in again.runs} == {fingerprint(record(run)) for run in grid.runs}


def test_labels_know_what_a_record_leaves_out():
    defaults, full = Settings().model_dump(), recorded(rounds=3)
    for dotted, value in LEFT_OUT.items():
        section, _, name = dotted.rpartition(".")
        assert (defaults[section] if section else defaults)[name] == value, dotted
        assert name not in (full[section] if section else full), dotted
    assert set(OFF) < set(LEFT_OUT)


def test_settings_reach_the_specification_of_a_run():
    given = {
        "client_optimizer": "adamw",
        "weight_decay": 0.1,
        "client_beta2": 0.99,
        "step_schedule": {"name": "cosine", "warm_up": 2, "floor": 0.1},
        "partition": {"name": "iid", "clients": 5},
        "rounds": 3,
    }
    spec = Materials("cpu").spec(complete(Settings(**given)))
    assert (spec.client_optimizer, spec.weight_decay, spec.client_beta2, spec.nesterov) == ("adamw", 0.1, 0.99, False)
    assert spec.step_schedule == Schedule("cosine", warm_up=2, floor=0.1)
    assert not spec.round_schedule.changes


def test_the_recipe_of_the_literature_is_one_settings_file():
    grid = read_grid(ROOT / "examples" / "fl_simulator.toml")
    run = grid.runs[0]
    assert len(grid.runs) == 10
    assert (run.partition.name, run.model) == ("client_dirichlet", "resnet18-gn-imagenet")
    assert (run.partition.alpha, run.partition.clients, run.clients_per_round) == (0.1, 100, 10)
    assert (run.local_epochs, run.batch_size, run.rounds, run.augment) == (5, 50, 1000, "half_crop_flip")
    assert (run.weight_decay, run.gradient_clip, run.momentum) == (1e-3, 10.0, 0.0)
    assert factor(schedule_of(run.round_schedule), 100, 1000) == pytest.approx(0.998**100)
