"""A user's data and modules in runs: what is chosen to fit them, what is said, and what is recorded."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from commands import call
from fedgma.data.federation import federate, place
from fedgma.data.files import from_arrays
from fedgma.data.partitions import by_function
from fedgma.data.pools import normalisation_of
from fedgma.data.splits import divide
from fedgma.errors import ConfigError, DataError, FedgmaError
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.own.defaults import describe, fit_partition, usual_model
from fedgma.experiments.plan import plan
from fedgma.experiments.settings import complete, record
from fedgma.experiments.settings.partition import PartitionSettings
from fedgma.records.format import recorded_normalisation
from fedgma.records.reader import read_head
from fedgma.training.models import build

QUICK = {"rounds": 1, "seed": 0, "aggregator": "gma", "mask_every": 0}


def points(samples=120, classes=3):
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    return rng.normal(size=(samples, 4)).astype(np.float32) + y[:, None], y


def adopted(settings, data, **options):
    materials = Materials("cpu", data=data, **options)
    (run,) = plan(experiments.grid_of({**QUICK, **settings}, own=True), materials, None)
    return run.settings, list(materials.remarks)


def test_data_that_name_their_clients_are_divided_by_them_and_it_is_said():
    x, y = points()
    settings, said = adopted({}, (x, y, ["a", "b", "c", "d"] * 30))
    assert (settings.partition.name, settings.clients_per_round, settings.model) == ("natural", 4, "mlp")
    assert said == [
        "own: 96 training and 24 test samples of shape [4], 3 classes",
        "own: the clients a, b, c, d are numbered from 0",
        "partition: natural, because the data name 4 clients; partition.name=label_skew divides by class instead",
        "model: mlp, for samples of shape [4]",
    ]
    settings, said = adopted({"partition": "iid"}, (x, y, ["a", "b", "c", "d"] * 30))
    assert settings.partition.name == "iid"
    assert "iid, 9 clients of about 10 samples, because 96 samples cannot be divided" in said[-2]
    assert "the 4 clients that the data name are not used" in said[-2]


def test_samples_that_leave_none_for_testing_are_refused():
    with pytest.raises(ConfigError, match="own: 4 samples leave none for testing; give more, or a test part"):
        experiments.run({"rounds": 1}, data=(np.zeros((4, 2)), [0, 0, 1, 1]))


def test_targets_of_another_kind_are_refused_with_the_task_that_fits():
    with pytest.raises(ConfigError, match=r"those of own are .*; set task=multi_label for these"):
        adopted({"task": "regression"}, from_arrays(np.zeros((20, 3)), np.eye(2)[[0, 1] * 10], target="labels"))


def test_labels_that_are_ids_are_told_apart_from_too_few_samples():
    with pytest.raises(ConfigError, match=r"30 samples leave none .*ids, or numbers to pred"):
        adopted({}, (np.zeros((30, 3)), np.arange(30)))


def test_a_class_that_makes_blind_models_look_good_is_named():
    x, _ = points()
    said = "own: a model that always says '1' is right in 75% of the tests"
    assert said in adopted({}, (x, np.arange(120) % 4 > 0))[1]
    assert not [line for line in adopted({}, (x, np.arange(120) % 3))[1] if "always" in line]


def test_settings_of_a_program_may_have_dots_numbers_of_numpy_and_ranges():
    given = {"partition.clients": np.int64(6), "rounds": np.int32(2), "tau": np.float32(0.5), "seed": range(3, 5)}
    grid = experiments.grid_of({**given, "aggregator": ("gma",), "dataset": Path("fmnist-mini")})
    assert [(run.partition.clients, run.rounds, run.tau, run.seed) for run in grid.runs] == [
        (6, 2, 0.5, s) for s in (3, 4)
    ]
    with pytest.raises(ConfigError, match=r"unknown setting 'partition.client'; did you mean 'partition.clients'\?"):
        experiments.grid_of({"partition.client": 5})


def test_large_targets_are_said():
    x, y = points()
    assert (
        "own: targets reach 2e+05: scale them, or training may diverge or learn nothing"
        in adopted({"task": "regression"}, (x, y * 1e5))[1]
    )


@pytest.mark.parametrize(("factor", "said"), [(85, "values reach "), (1e-6, "no value is above ")])
def test_features_that_are_not_scaled_are_said(factor, said):
    x, y = points()
    x = factor * x / abs(x).max()
    remarks = adopted({}, (x, y))[1]
    assert any(line.startswith(f"own: {said}") and "scale the features, for example to" in line for line in remarks)
    assert not any("scale" in line for line in adopted({}, (x / factor, y))[1])


def test_a_test_part_without_samples_is_refused_as_such():
    x, y = points()
    for test in ((x[:0], y[:0]), ([], [])):
        with pytest.raises(DataError, match="own: the test part has no samples; without one"):
            adopted({}, ((x, y), test))


def test_owners_are_grouped_or_the_fix_is_said():
    x, y = points()
    settings, _ = adopted({"partition": {"clients": 2}}, (x, y, ["a", "b", "c", "d"] * 30))
    assert (settings.partition.name, settings.partition.clients) == ("natural", 2)
    with pytest.raises(ConfigError, match=r"name 4 clients, which cannot make 20; leave partition\.clients out"):
        adopted({"partition": {"clients": 20}}, (x, y, ["a", "b", "c", "d"] * 30))


def test_clients_that_are_left_without_training_samples_are_counted():
    x, y = points(100)
    said = describe(from_arrays(x, y, client=np.arange(100) // 2))
    data = from_arrays(x, y, client=np.arange(100) // 2)
    lost = 50 - len(np.unique(data.train.client))
    assert lost > 0
    assert f"own: {lost} of 50 clients have test samples only and do not train" in said
    assert not any("do not train" in line for line in describe(from_arrays(x, y, client=np.arange(100) % 4)))


@pytest.mark.parametrize(
    ("given", "samples", "found", "said"),
    [
        ({"clients": 20}, 150, (20, "shards"), "20 clients with mode=shards, because 20 clients of 2 classes make 40"),
        ({}, 150, (12, "exact"), "12 clients of about 10 samples, because 100 clients of 2 classes make 200 shards"),
        ({}, 3000, (100, "shards"), "100 clients with mode=shards, because"),
        ({"clients": 3}, 150, (3, "exact"), "label_skew, 3 clients"),
        ({}, 15, (2, "shards"), "2 clients with mode=shards, because"),
    ],
)
def test_the_classes_of_a_users_data_are_shared_in_a_way_that_works(given, samples, found, said):
    data = from_arrays(*points(samples))
    part, why = fit_partition(PartitionSettings(**given), data)
    assert (part.clients, part.mode) == found
    assert said in why
    assert len(
        divide(data, part.name, part.clients, classes_per_client=part.classes_per_client, mode=part.mode).clients
    )


def test_a_mode_that_was_asked_for_is_not_replaced():
    with pytest.raises(ConfigError, match="which 3 classes cannot share equally"):
        fit_partition(PartitionSettings(name="label_skew", clients=20, mode="exact"), from_arrays(*points(150)))


def test_where_the_old_defaults_work_they_stay_and_so_do_the_records():
    rng = np.random.default_rng(0)
    images, y = rng.integers(0, 255, (2500, 12, 12), np.uint8), np.arange(2500) % 10
    settings, said = adopted({}, (images, y))
    named = complete(settings.model_copy(update={"dataset": "fmnist-mini"}))
    assert record(settings) == {**record(named), "dataset": "own:own"}
    assert record(settings)["partition"] == record(expand(QUICK).runs[0])["partition"]
    assert settings.model == "lenet"
    assert said[1] == "partition: label_skew, 100 clients"


@pytest.mark.parametrize("shape", [(4,), (28, 28), (1, 12, 12), (3, 11, 40), (1, 6, 6), (3, 5, 9), (2, 3, 4, 5)])
def test_the_usual_model_takes_the_samples(shape):
    model = build(usual_model(shape), shape, 3, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 3)


def test_own_files_are_run_and_what_was_understood_is_printed_and_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("small.npz", x=rng.integers(0, 255, (60, 8, 8, 3), np.uint8), y=np.arange(60) % 3 * 1000)
    code, printed, said = call("run", "dataset=small.npz", "rounds=1", "seed=0", "mask_every=0")
    assert (code, said) == (0, "")
    lines = printed.splitlines()
    assert lines[:2] == [
        "small: 48 training and 12 test samples of shape [3, 8, 8], 3 classes",
        "small: the labels 0, 1000, 2000 are numbered from 0",
    ]
    assert lines[2].startswith("partition: label_skew, 4 clients")
    assert lines[3] == "model: cnn, for samples of shape [3, 8, 8]"
    head = read_head(next((tmp_path / "runs").iterdir()))
    assert head["data"]["classes"] == ["0", "1000", "2000"]
    assert head["data"]["reading"] == ["the labels 0, 1000, 2000 are numbered from 0"]


def test_a_folder_in_the_current_folder_needs_no_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinics").mkdir()
    for name in ("a", "b"):
        rows = "".join(f"{i},{i % 2}\n" for i in range(20))
        (tmp_path / "clinics" / f"{name}.csv").write_text("age,label\n" + rows)
    materials = Materials("cpu")
    (run,) = plan(expand({**QUICK, "dataset": "clinics"}), materials, None)
    assert (run.recorded["dataset"], run.settings.clients_per_round) == ("clinics", 2)
    assert run.settings.partition.name == "natural"
    with pytest.raises(ConfigError, match=r"unknown data set 'clinic'; known: .* such as '\./clinic'"):
        expand({"dataset": "clinic"})


def test_labels_that_are_read_in_another_way_make_other_runs(tmp_path):
    x, y = points(60)
    for file, labels in (("plain", y), ("shifted", y + 1)):
        np.savez(tmp_path / f"{file}.npz", x=x, y=labels)
    identities = {}
    for file in ("plain", "shifted"):
        chosen = {**QUICK, "dataset": str(tmp_path / f"{file}.npz")}
        materials = Materials("cpu")
        (run,) = plan(expand(chosen), materials, None)
        identities[file] = run.identity["data"], materials.dataset(run.settings).source.sha256
    assert identities["plain"][0] == identities["plain"][1]  # as it always was
    assert identities["shifted"][0] != identities["shifted"][1]


def test_every_client_is_tested_on_its_own_samples_where_these_have_owners():
    x, y = points(12, classes=2)
    data = from_arrays(x, y, client=[0] * 6 + [1] * 6, test=(x[:4], y[:4], [1, 0, 1, 7]))
    tests = federate(data, divide(data, "natural"), client_test_size=5).client_tests
    assert [index.tolist() for index in tests] == [[1], [0, 2]]
    mixed = federate(data, divide(data, "iid", 2), client_test_size=4).client_tests
    assert [len(index) for index in mixed] == [4, 4]  # by class, since clients share owners


def halves(labels, clients, generator):
    order = generator.permutation(len(labels))
    return np.array_split(order, clients)


def test_a_users_function_divides_the_samples(tmp_path):
    found = by_function(halves, np.zeros(10), 3, seed=1)
    assert sorted(np.concatenate(found.clients).tolist()) == list(range(10))
    assert found.clients[0].tolist() == by_function(halves, np.zeros(10), 3, seed=1).clients[0].tolist()
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef halves(labels, clients, generator):\n"
        "    return np.array_split(generator.permutation(len(labels)), clients)\n"
    )
    x, y = points()
    chosen = {**QUICK, "partition": {"name": f"{tmp_path / 'mine.py'}:halves", "clients": 5}}
    by_file = Materials("cpu", data=(x, y))
    (run,) = plan(experiments.grid_of(chosen, own=True), by_file, None)
    assert run.recorded["partition"]["name"] == "mine.py:halves"
    by_name = Materials("cpu", data=(x, y), partition=halves)
    (same,) = plan(experiments.grid_of({**QUICK, "partition": {"clients": 5}}, own=True), by_name, None)
    assert same.recorded["partition"]["name"] == "own:halves"
    for first, second in zip(
        by_file.federation(run.settings).clients, by_name.federation(same.settings).clients, strict=True
    ):
        np.testing.assert_array_equal(first, second)
    other = Materials("cpu", data=(x, y), partition=lambda labels, clients, generator: [[0]] * clients)
    assert plan(experiments.grid_of(QUICK, own=True), other, None)[0].identity != same.identity
    assert by_file.located(run.settings).partition.name == f"{tmp_path / 'mine.py'}:halves"


def test_a_users_function_works_on_a_known_data_set():
    settings = {**QUICK, "model": "logistic", "partition": {"clients": 4}, "clients_per_round": 2}
    (played,) = experiments.rounds(settings, partition=halves)
    assert played.line["counted"] == 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda labels, clients: [], r"could not be called as function\(labels, clients, generator\) \(TypeError"),
        (lambda labels, clients, rng: 1 / 0, "ZeroDivisionError"),
        (lambda labels, clients, rng: None, "TypeError"),
        (lambda labels, clients, rng: [[0]], r"of 3 clients, got those of 1; set partition\.clients=1"),
        (lambda labels, clients, rng: [[0], [0], [1]], "a sample to one client, got sample 0 twice"),
        (lambda labels, clients, rng: [[0], [1], [10]], "indices from 0 to 9, got 0 to 10"),
        (lambda labels, clients, rng: [[0], [-1], [2]], "indices from 0 to 9, got -1 to 2"),
        (lambda labels, clients, rng: [[0], [0.5], [2]], r"whole numbers for client 1, got float64\[1\]"),
        (lambda labels, clients, rng: [[0], [[1]], [2]], r"whole numbers for client 1, got int64\[1, 1\]"),
        (lambda labels, clients, rng: [[], [], []], "must give samples to the clients, got none"),
    ],
)
def test_a_partition_that_is_none_is_refused_with_a_sentence(function, said):
    with pytest.raises(ConfigError, match=said):
        by_function(function, np.zeros(10), 3)


def test_samples_that_a_function_leaves_out_are_counted():
    assert by_function(lambda labels, clients, rng: [[1], [3]], np.zeros(5), 2, name="mine").notes == (
        "partition mine leaves 3 of 5 samples out",
    )


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Pair(Plain):
    def forward(self, x):
        return super().forward(x), x


def test_a_module_that_does_not_fit_ends_before_a_folder_is_made(tmp_path):
    with pytest.raises(ConfigError, match="model own:Pair must return one tensor of logits"):
        experiments.run(QUICK, data=points(), model=Pair, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    outcome = experiments.run(QUICK, data=points(), model=Plain, out=tmp_path)
    assert len(outcome.runs[0].rounds) == 1


def test_remarks_are_logged_in_python(caplog):
    with caplog.at_level(logging.INFO, "fedgma"):
        adopted({}, points())
    assert "model: mlp, for samples of shape [4]" in caplog.text


@pytest.mark.parametrize("shift", ["none", "colour"])
def test_the_normalisation_of_images_is_recorded_so_that_the_model_can_be_used(tmp_path, shift):
    rng = np.random.default_rng(0)
    data = from_arrays(rng.integers(0, 255, (40, 12, 12), np.uint8), np.arange(40) % 2)
    settings = {**QUICK, "model": "logistic", "partition": {"name": "iid", "clients": 2}, "shift": shift}
    experiments.run(settings, data=data, out=tmp_path)
    head = read_head(next(tmp_path.iterdir()))
    mean, std = recorded_normalisation(head)
    pool = federate(place(data), divide(data, "iid", 2)).train
    assert len(mean) == (3 if shift == "colour" else 1)
    assert head["data"]["shape"] == [len(mean), 12, 12]
    if shift == "none":
        assert (tuple(mean), tuple(std)) == normalisation_of(pool)
        shown = (data.train.x[:3] / 255 - np.reshape(mean, (1, -1, 1, 1))) / np.reshape(std, (1, -1, 1, 1))
        index = torch.arange(3)
        np.testing.assert_allclose(pool.batch(index, index)[0].numpy(), shown, atol=1e-5)


def test_features_have_no_normalisation(tmp_path):
    experiments.run(QUICK, data=points(), out=tmp_path)
    head = read_head(next(tmp_path.iterdir()))
    assert recorded_normalisation(head) is None
    assert recorded_normalisation({"data": {"normalisation": {"mean": ["x"], "std": []}}}) is None
    assert "normalisation" not in json.dumps(head)


@pytest.mark.parametrize("given", [5, 0.5, True])
def test_a_section_that_is_a_number_is_refused_in_the_users_words(given):
    with pytest.raises(ConfigError, match="partition: expected a name, or a table such as") as caught:
        expand({"partition": given})
    assert "PartitionSettings" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name"),
    [("partition", "iid"), ("step_schedule", "cosine"), ("clock", "synchronous"), ("shift", "colour")],
)
def test_the_table_that_is_shown_in_place_of_another_value_is_one_of_its_section(section, name):
    with pytest.raises(ConfigError, match=f'{section}: expected a name, or a table such as {{ name = "{name}" }}'):
        expand({section: 5})
    expand({section: {"name": name}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"partition": "iid"}, "partition must be a function of labels, clients and generator, got 'iid'; a partition"),
        (
            {"aggregator": ["mean", "ties"]},
            r"a rule .*, got \['mean', 'ties'\]; give one rule, or name several in the settings",
        ),
        ({"model": 3}, "model must be a name, a module or a function that makes one, got 3"),
        (
            {"data": "mine.npz"},
            "arrays or a table, got a path; name it in the settings: dataset='mine.npz'",
        ),
    ],
)
def test_what_belongs_into_the_settings_is_said_to(given, said):
    with pytest.raises(FedgmaError, match=said):
        experiments.run({"rounds": 1}, **{"data": points(), **given})
