"""Malicious clients and curious servers (G rows): what each attack does to the rules, in runs of a second.

The tables of docs/robustness.md are measured on Fashion-MNIST; these tests show the same on small images.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.server import MaskedServer
from fedgma.data.federation import federate
from fedgma.data.files import from_arrays
from fedgma.data.partitions import iid
from fedgma.data.poison import flip_labels, open_backdoor
from fedgma.paper.analyses.attacks import figures, halves, lira, rmia
from fedgma.simulation.attacks import Attack, malicious
from fedgma.simulation.fleet import assemble, play, play_round, start
from fedgma.simulation.spec import RunSpec
from fedgma.training.stacked import unflatten
from rows import row

CLIENTS, CLASSES, SIDE = 20, 5, 10
ROBUST = {"median": fedgma.median(), "trimmed": fedgma.trimmed_mean(0.3), "krum": fedgma.multi_krum(0.3)}
RULES = {
    "mean": fedgma.mean(),
    "gma": fedgma.masked_mean(0.4),
    "clipped": fedgma.clipped(fedgma.mean(), 0.5),
    "rlr": fedgma.rlr(8),
    **ROBUST,
}


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    patterns = rng.integers(100, 156, (CLASSES, SIDE, SIDE))
    labels = rng.integers(0, CLASSES, 2000)
    images = np.clip(patterns[labels] + rng.normal(0, 60, (2000, SIDE, SIDE)), 0, 255).astype(np.uint8)
    data = from_arrays(images, labels)
    return federate(data, iid(data.train.y, CLIENTS, seed=1))


@pytest.fixture(scope="module")
def played(federation):
    """The last records of runs under attack, all of them in one fleet: (rule, attack, share, scale) -> record."""
    attackers = malicious(0, CLIENTS, 0.3)
    poisoned = {"label_flip": flip_labels(federation, attackers), "backdoor": open_backdoor(federation, attackers)}

    def play_all(cases, **settings):
        specs = [
            RunSpec(
                poisoned.get(attack, federation),
                model="logistic",
                rule=RULES[rule],
                attack=None if attack is None else Attack(attack, share, scale),
                evaluate_on=("test", "backdoor") if attack == "backdoor" else ("test",),
                **{
                    **{"rounds": 15, "clients_per_round": CLIENTS, "local_steps": 4, "batch_size": 16, "momentum": 0.0},
                    **{"client_learning_rate": 0.05, "evaluate_every": 100},
                    **settings,
                },
            )
            for rule, attack, share, scale in cases
        ]
        *_, last = play(specs, trainer="lanes")
        return dict(zip(cases, last.records, strict=True))

    return play_all


def accuracy(record, pool="test"):
    return 100 * record.scores[pool]["accuracy"]


def loss(record):
    return record.scores["test"]["loss"]


CLEAN = ("mean", None, 0.0, 1.0)


@row(
    "G1",
    "clients reverse their updates",
    happens="GMA does not help; a robust rule keeps 90 % of the accuracy on iid data with 30 % attackers",
    seen="the tables of [robustness](robustness.md)",
)
def test_g1_a_robust_rule_withstands_thirty_percent_of_sign_flips(played):
    cases = [CLEAN, *((rule, "sign_flip", 0.3, 3.0) for rule in RULES)]
    records = played(cases)
    clean = accuracy(records[CLEAN])
    found = {rule: accuracy(records[rule, "sign_flip", 0.3, 3.0]) for rule in RULES}
    assert max(found[rule] for rule in ROBUST) >= 0.9 * clean, found
    assert max(found["mean"], found["gma"]) + 20 < min(found[rule] for rule in ROBUST), found


@row(
    "G2",
    "clients send reversed updates at 10 or 1,000 times their length",
    happens="clipping makes them as short as others; the norm bound of a deployment refuses them",
    seen="`norm` beside the client's name",
)
def test_g2_clipping_takes_the_length_out_of_an_attack(played):
    cases = [("clipped", "sign_flip", 0.1, scale) for scale in (10.0, 1000.0)]
    ten, thousand = (accuracy(record) for record in played(cases).values())
    assert abs(thousand - ten) <= 1
    bare = ("mean", "sign_flip", 0.1, 10.0)
    assert accuracy(played([bare])[bare]) < ten - 20


@row("G2")
def test_g2_the_norm_bound_refuses_long_updates_by_name(played):
    case = ("mean", "sign_flip", 0.1, 1000.0)
    record = played([case], norm_factor=10.0)[case]
    expected = np.flatnonzero(malicious(0, CLIENTS, 0.1)).tolist()
    assert record.refused == tuple((client, "norm") for client in expected)
    assert accuracy(record) >= accuracy(played([CLEAN])[CLEAN]) - 5


@row(
    "G3",
    "clients send noise or one value for all entries",
    happens="long noise ruins mean and GMA; trimmed mean and multi-Krum withstand it",
    seen="the tables of [robustness](robustness.md)",
)
def test_g3_noise_and_constant_updates(played):
    cases = [CLEAN, *((r, a, 0.3, 30.0) for r in ("mean", "trimmed", "krum") for a in ("noise", "same_value"))]
    records = played(cases)
    clean = accuracy(records[CLEAN])
    assert all(accuracy(records[r, "noise", 0.3, 30.0]) >= 0.9 * clean for r in ("trimmed", "krum"))
    assert accuracy(records["krum", "same_value", 0.3, 30.0]) >= 0.9 * clean
    assert accuracy(records["mean", "noise", 0.3, 30.0]) < 0.9 * clean


@row(
    "G4",
    "clients collude: a little is enough, inner-product manipulation, mimicry",
    happens="no bound on norms sees them; GMA loses accuracy as the mean does; no rule withstands all of them",
    seen="the tables of [robustness](robustness.md)",
)
def test_g4_colluding_clients_pass_the_norm_bound(played):
    strong = {"alie": 1.5, "inner_product": 4.0, "mimic": 1.0}
    cases = [(rule, attack, 0.3, scale) for rule in ("mean", "gma") for attack, scale in strong.items()]
    records = played([CLEAN, ("gma", None, 0.0, 1.0), *cases], norm_factor=10.0)
    assert all(record.refused == () for record in records.values())
    for rule in ("mean", "gma"):
        clean = records[rule, None, 0.0, 1.0]
        assert accuracy(records[rule, "inner_product", 0.3, 4.0]) < 0.5 * accuracy(clean)
        assert loss(records[rule, "mimic", 0.3, 1.0]) > loss(clean)


@row(
    "G5",
    "an attacker knows the mask and its threshold",
    happens="it stops GMA at a length that no bound on norms sees, as it stops the mean",
    seen="the tables of [robustness](robustness.md)",
)
def test_g5_an_attacker_who_knows_the_mask_gets_its_length_past_it(federation, played):
    case = ("gma", "mask_aware", 0.3, 3.0)
    assert accuracy(played([case], norm_factor=10.0)[case]) < 0.7 * accuracy(played([CLEAN])[CLEAN])
    spec = RunSpec(federation, model="logistic", clients_per_round=CLIENTS, attack=Attack("mask_aware", 0.3, 3.0))
    fleet = assemble([spec], trainer="loop")
    before = start(fleet)
    honest, _ = play_round(assemble([RunSpec(federation, model="logistic", clients_per_round=CLIENTS)]), before)
    attacked, _ = play_round(fleet, start(fleet))
    steps = [state.params[0] - start(fleet).params[0] for state in (honest, attacked)]
    assert float(torch.dot(*steps)) < 0  # the masked step goes backwards


@row(
    "G6",
    "clients train a backdoor into the model",
    happens="the share of images that the trigger turns is scored beside accuracy; GMA does not remove it",
    seen="accuracy on the split `backdoor`, in records, reports and tables",
)
def test_g6_the_success_of_a_backdoor_is_scored_beside_accuracy(played):
    records = played([CLEAN, *((rule, "backdoor", 0.3, 3.0) for rule in ("mean", "gma", "clipped"))])
    assert accuracy(records["mean", "backdoor", 0.3, 3.0], "backdoor") > 60
    assert accuracy(records["gma", "backdoor", 0.3, 3.0], "backdoor") > 40
    assert "backdoor" not in records[CLEAN].scores


@row(
    "G7",
    "clients train with false labels",
    happens="the mean loses accuracy; the median and the trimmed mean lose less on iid data",
    seen="the tables of [robustness](robustness.md)",
)
def test_g7_reversed_labels(played):
    records = played([CLEAN, ("mean", "label_flip", 0.3, 3.0), ("median", "label_flip", 0.3, 3.0)])
    assert accuracy(records["median", "label_flip", 0.3, 3.0]) > accuracy(records["mean", "label_flip", 0.3, 3.0])
    assert accuracy(records["mean", "label_flip", 0.3, 3.0]) < accuracy(records[CLEAN])


@row(
    "G8",
    "free riders send zeros",
    happens="they count as clients: the mean shrinks, and agreement falls by their share for all entries",
    seen="a lower `agreement` in the round's record; the share of zeros in its mask statistics",
)
def test_g8_free_riders_lower_the_agreement_of_all(federation):
    updates = {"w": np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 3.0], [0.0, 0.0], [0.0, 0.0]])}
    merged = fedgma.masked_mean(0.7)(updates, [1] * 5)
    np.testing.assert_allclose(merged.mask["w"], 0.6)  # three of five; without them 1
    np.testing.assert_allclose(merged.mean["w"], 1.2)  # 2 without them
    shared = {"model": "logistic", "clients_per_round": CLIENTS, "local_steps": 2, "mask_every": 1}
    specs = [RunSpec(federation, **shared), RunSpec(federation, attack=Attack("zero", 0.3), **shared)]
    *_, last = play(specs, trainer="loop")
    honest, riding = last.records
    assert riding.agreement < honest.agreement
    assert riding.votes.whole.zeros >= honest.votes.whole.zeros + 0.25


@row(
    "G9",
    "one attacker votes under many names",
    happens="a client that was not selected or answers twice is refused; a selected sybil has one vote like any client",
    seen="`unselected` or `duplicate` beside the client's name",
)
def test_g9_a_vote_needs_a_selected_name_and_counts_once():
    good, bad = {"w": np.ones(2, np.float32)}, {"w": -np.ones(2, np.float32)}
    replies = [(good, 10, "a"), (bad, 10, "b"), (bad, 10, "b"), *((bad, 10, f"sybil{n}") for n in range(5))]
    server = MaskedServer(fedgma.mean(), norm_factor=None)
    step = server.step({"w": np.zeros(2, np.float32)}, replies, selected=["a", "b"])
    assert [(refusal.client, refusal.reason) for refusal in step.refused] == [
        ("b", "duplicate"),
        *((f"sybil{n}", "unselected") for n in range(5)),
    ]
    np.testing.assert_array_equal(step.params["w"], 0)  # one good and one bad vote, of equal weight


@row("G9")
def test_g9_sybils_that_are_selected_outvote_honest_clients(played):
    cases = [("gma", "sybil", 0.4, 3.0), ("median", "sybil", 0.4, 3.0)]
    records = played([CLEAN, *cases])
    assert accuracy(records[cases[0]]) < 0.5 * accuracy(records[CLEAN])
    assert accuracy(records[cases[1]]) > accuracy(records[cases[0]])


@row(
    "G10",
    "an outsider asks which samples a model was trained on",
    happens="GMA gives no privacy; experiment E16 measures LiRA and RMIA at 0.1 % and 1 % false positives",
    seen="[analyses](analyses.md)",
)
def test_g10_membership_attacks_find_members_where_models_memorise():
    rng = np.random.default_rng(0)
    inside = halves(16, 2000)
    confidence = rng.normal(0, 1, inside.shape) + 3.0 * inside
    for attack in (lira, rmia):
        found = figures(attack(confidence, inside, 0), inside[0])
        assert found["tpr_at_1%"] > 20
        nothing = figures(attack(rng.normal(0, 1, inside.shape), inside, 0), inside[0])
        assert nothing["tpr_at_1%"] < 5


@row(
    "G11",
    "a server rebuilds a client's sample from its update",
    happens="one step on one sample gives the sample away exactly; use secure aggregation or larger batches",
    seen="nothing: the server needs no cooperation",
)
def test_g11_an_update_of_one_sample_shows_the_sample(federation):
    spec = RunSpec(federation, model="logistic", clients_per_round=CLIENTS, batch_size=1, local_steps=1, momentum=0.0)
    fleet = assemble([spec], trainer="loop")
    taken = []

    def train(assignment):
        trained = fleet.train(assignment)
        taken.append((assignment.lane_batch, unflatten(trained.flat, fleet.shapes)))
        return trained

    play_round(replace(fleet, train=train), start(fleet))
    ((lanes, updates),) = taken
    weight, bias = (next(value for name, value in updates.items() if name.endswith(end)) for end in ("weight", "bias"))
    index = torch.from_numpy(lanes.index[:, 0, 0])
    images, _ = federation.train.batch(index, torch.zeros_like(index))
    largest = bias.abs().argmax(1)
    rebuilt = torch.stack([weight[lane, k] / bias[lane, k] for lane, k in enumerate(largest.tolist())])
    torch.testing.assert_close(rebuilt, images.flatten(1), rtol=1e-3, atol=1e-3)


@row(
    "G12",
    "logs or metrics show a client's data",
    happens="a deployment reports sums over clients only: counts, mean mask, share unmasked",
    seen="`gma-clients`, `gma-refused`, `gma-mask-mean`, `gma-share-unmasked`",
)
def test_g12_a_servers_statistics_are_about_all_clients_together():
    replies = [({"w": np.array([1.0, -1.0 * client])}, 10 + client, f"node{client}") for client in range(3)]
    replies.append(({"w": np.array([np.nan, 7.25])}, 10, "broken"))
    step = MaskedServer().step({"w": np.zeros(2)}, replies)
    assert set(step.statistics) == {"gma-clients", "gma-refused", "gma-mask-mean", "gma-share-unmasked"}
    assert all(isinstance(value, int | float) for value in step.statistics.values())
    assert "7.25" not in str(step.refused)  # a refusal names the client and the fault, not its numbers
