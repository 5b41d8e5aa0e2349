"""A run alone, in company, chunked, stopped and resumed: the same run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedgma
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import dirichlet, iid
from fedgma.data.shifts import Colour, Rotation
from fedgma.errors import ConfigError
from fedgma.simulation.fleet import assemble, lay_lane_batch, play, play_round, restore, start
from fedgma.simulation.sampling import sample_clients, steps_of_a_round
from fedgma.simulation.state import export
from fedgma.training.lane_batch import Assignment, ship_batches
from fedgma.training.stacked import unflatten
from plain_pools import PlainFederation, make_federation, make_pool
from run_specs import Normalised, make_spec, relative_distance

SHAPE = (1, 28, 28)
UNEVEN = [20, 13, 30, 8, 25, 40]
SENT = [(0, "gma"), (0, "mean"), (1, "and_mask")]


def last(specs, **options):
    *_, played = play(specs, **options)
    return played


def run_of(federation, **settings):
    return make_spec(
        federation, **{"model": "logistic", "rounds": 3, "clients_per_round": 4, "batch_size": 8, **settings}
    )


def fifty_runs():
    federations = [make_federation(UNEVEN, SHAPE, seed=s) for s in range(2)]
    federations.append(PlainFederation(federations[0].train, federations[0].test, federations[0].clients[:5]))
    names, kinds = (
        ["gma", "mean", "and_mask", "damped_mean", "shuffled_mask"],
        ["sgd", "momentum", "adagrad", "adam", "yogi"],
    )
    return [
        run_of(
            federations[i % 3],
            seed=i,
            clients_per_round=2 + i % 4,
            aggregator=names[i % len(names)],
            tau=0.1 * (i % 10),
            server=kinds[i % 5],
            server_lr=1.0 if kinds[i % 5] in ("sgd", "momentum") else 0.01,
            lr=[0.05, 0.01, 0.1][i % 3],
            momentum=0.9 * (i % 2),
            mu=0.1 * (i % 3),
            local_epochs=1 + i % 2,
            scaffold=i % 7 == 0,
            rounds=2 + i % 2,
        )
        for i in range(50)
    ]


def test_a_run_alone_and_in_a_fleet_of_fifty_is_the_same_run():
    specs = fifty_runs()
    company = {}
    for played in play(specs, trainer="lanes"):
        for record in played.records:
            company[record.run, record.round] = record
    for run in (0, 3, 7, 14, 22, 33, 49):
        rounds = list(play([specs[run]], trainer="lanes"))
        assert len(rounds) == specs[run].rounds
        for alone in rounds:
            beside = company[run, alone.records[0].round]
            assert alone.records[0].sampled == beside.sampled
            assert alone.records[0].train_loss == pytest.approx(beside.train_loss, rel=1e-5)
        assert relative_distance(rounds[-1].state.params[0], played.state.params[run]) < 1e-5


@pytest.mark.parametrize("scaffold", [False, True])
def test_lanes_and_loop_give_the_same_run(scaffold):
    specs = [
        run_of(make_federation(UNEVEN, SHAPE), model="lenet", scaffold=scaffold, server=kind, server_lr=rate, lr=0.01)
        for kind, rate in (("sgd", 1.0), ("adam", 0.01))
    ]
    first, second = (last(specs, trainer=name).state for name in ("loop", "lanes"))
    assert (
        relative_distance(first.params, second.params) < 5e-4
    )  # a tie in pooling that rounding breaks the other way costs 4e-5


@pytest.fixture(scope="module")
def images():
    mini = load("fmnist-mini")
    return [federate(mini, dirichlet(mini.train.y, 30, alpha=0.5, seed=s)) for s in (0, 1)]


@pytest.mark.parametrize("model", ["lenet", "logistic"])
def test_compiled_kernels_and_loop_give_the_same_fleet(images, model):
    pytest.importorskip("numba")
    specs = [
        make_spec(
            images[i % 2],
            model=model,
            rounds=2,
            clients_per_round=3,
            seed=i,
            lr=0.01,
            local_steps=3,
            evaluate_every=0,
            **more,
        )
        for i, more in enumerate(
            ({}, {"mu": 0.1, "server": "adam", "server_lr": 0.01}, {"scaffold": True, "clip": 1.0})
        )
    ]
    first, second = (last(specs, trainer=name) for name in ("loop", "kernels"))
    assert relative_distance(first.state.params, second.state.params) < 1e-5
    for slow, fast in zip(first.records, second.records, strict=True):
        assert slow.sampled == fast.sampled
        assert slow.train_loss == pytest.approx(fast.train_loss, rel=1e-4)


@pytest.mark.parametrize("shift", [Colour(), Rotation()])
@pytest.mark.parametrize("shown", [1, 2**26])
def test_compiled_kernels_show_every_client_its_own_colours_or_angle(monkeypatch, shift, shown):
    pytest.importorskip("numba")
    from fedgma.training.fast.cpu import trainer

    monkeypatch.setattr(trainer, "SHOWN", shown)  # two clients at a time, or all
    monkeypatch.setattr(trainer, "available_cores", lambda: 2)
    mini = load("fmnist-mini")
    federation = federate(mini, dirichlet(mini.train.y[:900], 6, alpha=0.5, seed=1), shift=shift, seed=3)
    runs = [make_spec(federation, model="lenet", rounds=2, clients_per_round=5, seed=i, lr=0.01) for i in range(2)]
    first, second = (last(runs, trainer=name) for name in ("loop", "kernels"))
    assert relative_distance(first.state.params, second.state.params) < 1e-5
    for slow, fast in zip(first.records, second.records, strict=True):
        for split, scored in slow.scores.items():
            assert fast.scores[split]["loss"] == pytest.approx(scored["loss"], rel=1e-4)
    alone = last(runs[1:], trainer="kernels")
    assert torch.equal(alone.state.params[0], second.state.params[1])


def test_compiled_kernels_show_the_samples_of_a_client_once_to_all_paired_runs(monkeypatch):
    pytest.importorskip("numba")
    from fedgma.training.fast.cpu import trainer

    shown, show = [], trainer._seen

    def watched(pool, index, client):
        shown.extend(zip(client.tolist(), index.tolist(), strict=True))
        return show(pool, index, client)

    monkeypatch.setattr(trainer, "_seen", watched)
    mini = load("fmnist-mini")
    federation = federate(mini, dirichlet(mini.train.y[:300], 4, alpha=0.5, seed=1), shift=Rotation(), seed=3)
    arms = [make_spec(federation, rounds=1, clients_per_round=4, lr=0.01, mu=mu, evaluate_every=0) for mu in (0.0, 0.1)]
    last(arms, trainer="kernels")
    trained = {(client, sample) for client, samples in enumerate(federation.clients) for sample in samples.tolist()}
    assert trained <= set(shown)
    assert len(shown) == len(set(shown))


def test_a_model_without_a_compiled_kernel_is_refused_only_when_it_is_asked_for():
    federation = make_federation(UNEVEN, SHAPE)
    with pytest.raises(ConfigError, match="no CPU kernel for Logistic on this data"):
        assemble([run_of(federation)], trainer="kernels")
    assert last([run_of(federation)], trainer="auto").records[0].clients == 4


@pytest.mark.parametrize("trainer", ["loop", "lanes"])
def test_the_same_fleet_gives_the_same_bits(trainer):
    first, second = (last(fifty_runs()[:8], trainer=trainer).state for _ in range(2))
    assert torch.equal(first.params, second.params)
    assert torch.equal(first.moments.v, second.moments.v)


def test_chunking_the_lanes_does_not_change_a_bit_of_the_loop():
    specs = fifty_runs()[:8]
    whole, cut = last(specs, trainer="loop", chunk=1000).state, last(specs, trainer="loop", chunk=3).state
    assert torch.equal(whole.params, cut.params)


def test_chunking_the_lanes_leaves_lanes_the_same():
    specs = fifty_runs()[:8]
    whole, cut = last(specs, trainer="lanes", chunk=1000).state, last(specs, trainer="lanes", chunk=3).state
    assert relative_distance(whole.params, cut.params) < 1e-5


def test_a_large_round_is_trained_a_few_lanes_at_a_time():
    fleet = assemble([run_of(make_federation([6] * 40, SHAPE), clients_per_round=40)], trainer="loop", chunk=7)
    seen = []

    def watched(assignment):
        seen.append(assignment.lane_batch.index.nbytes)
        assert assignment.lane_batch.size <= 7
        return fleet.train(assignment)

    _, played = play_round(replace(fleet, train=watched), start(fleet))
    assert len(seen) == 6
    assert max(seen) == 7 * 6 * 8  # lanes x one batch of 6 indices of 8 bytes, whatever the round
    assert played.records[0].clients == 40


@pytest.mark.parametrize("epochs", [(2, 2), (1, 2)])  # drawn together, and one by one
@pytest.mark.parametrize("trainer", ["loop", "lanes"])
def test_a_batch_larger_than_every_client_gives_the_bits_of_one_as_large_as_the_largest(trainer, epochs):
    federations = [make_federation(UNEVEN, SHAPE), make_federation([7, 1, 9, 9], SHAPE, seed=1)]

    def play_with(batch):
        given = [{"batch_size": batch, "smallest_batch": 2, "local_epochs": number} for number in epochs]
        return last([run_of(data, **more) for data, more in zip(federations, given, strict=True)], trainer=trainer)

    played = [play_with(max(UNEVEN)), play_with(10**12)]  # which no memory could hold
    assert torch.equal(played[0].state.params, played[1].state.params)
    assert [record.train for record in played[0].records] == [record.train for record in played[1].records]


def test_no_batch_is_wider_than_the_largest_client_and_the_runs_keep_what_they_were_given():
    spec = run_of(make_federation([6] * 40, SHAPE), clients_per_round=40, batch_size=500)
    fleet = assemble([spec, spec], trainer="loop")
    seen = []

    def watched(assignment):
        seen.append(assignment.lane_batch.index.shape[-1])
        return fleet.train(assignment)

    play_round(replace(fleet, train=watched), start(fleet))
    assert set(seen) == {6}
    assert fleet.specs[0] is fleet.specs[1]
    assert spec.batch_size == 500
    tiny = run_of(make_federation([1, 1], SHAPE), clients_per_round=2, batch_size=500, smallest_batch=2)
    assert assemble([tiny]).specs[0].batch_size == 2  # else a batch of one sample would be a whole batch


@pytest.mark.parametrize("trainer", ["loop", "lanes"])
def test_a_resumed_run_is_the_same_to_the_bit(trainer):
    specs = [
        run_of(make_federation(UNEVEN, SHAPE), rounds=4, scaffold=i == 1, server=kind, seed=i)
        for i, kind in enumerate(("yogi", "sgd", "momentum"))
    ]
    straight = last(specs, trainer=trainer).state
    fleet = assemble(specs, trainer=trainer)
    state = start(fleet)
    for _ in range(2):
        state, _ = play_round(fleet, state)
    saved = [export(fleet, state, run) for run in range(3)]
    resumed = last(specs, states=saved, trainer=trainer).state
    assert torch.equal(straight.params, resumed.params)
    assert torch.equal(straight.moments.z, resumed.moments.z)
    assert torch.equal(straight.carried.control, resumed.carried.control)


def test_an_exported_state_is_plain_arrays_with_the_models_names():
    fleet = assemble([run_of(make_federation(UNEVEN, SHAPE))])
    saved = export(fleet, start(fleet), 0)
    assert all(type(value) is np.ndarray for value in saved.values())
    assert saved["params/linear.weight"].shape == (10, 784)
    assert int(saved["round"]) == 0


def test_runs_at_different_rounds_resume_together():
    specs = [run_of(make_federation(UNEVEN, SHAPE), seed=i, evaluate_every=0) for i in range(2)]
    straight = last(specs, trainer="loop").state
    fleet = assemble(specs[:1], trainer="loop")
    ahead, _ = play_round(fleet, start(fleet))
    fresh = assemble(specs[1:], trainer="loop")
    mixed = [export(fleet, ahead, 0), export(fresh, start(fresh), 0)]
    assert torch.equal(last(specs, states=mixed, trainer="loop").state.params, straight.params)


def test_a_round_samples_no_client_twice_and_depends_on_seed_and_round_alone():
    spec = run_of(make_federation([5] * 40, SHAPE), clients_per_round=20)
    first, again, later = sample_clients(spec, 1), sample_clients(spec, 1), sample_clients(spec, 2)
    assert len(set(first.tolist())) == 20
    assert first.tolist() == again.tolist() != later.tolist()


def test_clients_without_samples_are_left_out():
    federation = make_federation([10, 10, 10], SHAPE)
    federation = PlainFederation(federation.train, federation.test, (*federation.clients, np.array([], np.int64)))
    record = last([run_of(federation, rounds=1)]).records[0]
    assert record.sampled == (0, 1, 2)
    assert record.clients == 3


def test_a_client_that_diverges_is_left_out_of_mean_and_count():
    federation = make_federation([10, 10, 10], SHAPE)
    federation.train.x[federation.clients[1][0]] = float("nan")
    spec = run_of(federation, rounds=1, clients_per_round=3, aggregator="mean")
    played = last([spec])
    healthy = PlainFederation(federation.train, federation.test, (federation.clients[0], federation.clients[2]))
    assert played.records[0].clients == 2
    assert torch.isfinite(played.state.params).all()
    assert len(healthy.clients) == 2


def test_a_round_in_which_every_client_diverges_changes_nothing():
    federation = make_federation([10, 10], SHAPE)
    spec = run_of(federation, rounds=1, clients_per_round=2, lr=1e38, server="adam")
    fleet = assemble([spec])
    before = start(fleet)
    after, played = play_round(fleet, before)
    assert played.records[0].clients == 0
    assert torch.equal(before.params, after.params)
    assert torch.equal(before.moments.v, after.moments.v)


@pytest.mark.parametrize("further", [{}, {"norm_factor": 1e9}])
@pytest.mark.parametrize("trainer", ["loop", "threads", "lanes", "kernels"])
def test_a_round_in_which_no_client_counted_has_no_training_score(images, trainer, further):
    if trainer == "kernels":
        pytest.importorskip("numba")
    common = {"rounds": 1, "clients_per_round": 2, "evaluate_every": 0, "local_steps": 3, **further}
    specs = [run_of(images[0], lr=1e38, **common), run_of(images[0], **common)]
    lost, kept = last(specs, trainer=trainer).records
    assert (lost.clients, kept.clients) == (0, 2)
    assert np.isnan(list(lost.train.values())).all()
    assert np.isfinite(list(kept.train.values())).all()


def test_batch_normalisation_statistics_take_the_mean_and_counters_the_maximum():
    federation = make_federation([8, 4], (3, 8, 8))
    played = last(
        [run_of(federation, model="resnet18-bn", rounds=1, clients_per_round=2, batch_size=4)], trainer="lanes"
    )
    assert played.state.buffers["norm1.num_batches_tracked"].item() == 2
    assert (played.state.buffers["norm1.running_var"] > 0).all()


def test_runs_that_do_not_fit_together_are_refused():
    one = run_of(make_federation(UNEVEN, SHAPE))
    with pytest.raises(ConfigError, match="must share task, model, batch_size, augment"):
        assemble([one, run_of(one.federation, batch_size=4)])
    with pytest.raises(ConfigError, match="at least one run"):
        assemble([])
    with pytest.raises(ConfigError, match="one state for each of 1 runs, got 2"):
        restore(assemble([one]), [{}, {}])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clients_per_round": 7}, "6 clients, got 7"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"tau": 1.5}, "tau must be a number from 0 to 1, got 1.5"),
    ],
)
def test_a_run_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        run_of(make_federation(UNEVEN, SHAPE), **wrong)


def test_an_unknown_server_trainer_precision_or_pool_is_refused():
    federation = make_federation(UNEVEN, SHAPE)
    with pytest.raises(ConfigError, match="known: adagrad, adam, momentum, sgd, yogi"):
        run_of(federation, server="sgdm")
    with pytest.raises(ConfigError, match="known: auto, engine, kernels, lanes, loop"):
        assemble([run_of(federation)], trainer="fast")
    with pytest.raises(ConfigError, match="known: fp32, tf32, bf16"):
        assemble([run_of(federation)], precision="fp8")
    with pytest.raises(ConfigError, match="this federation has: test, train"):
        last([run_of(federation, evaluate_on=("ood",))])


def test_training_lowers_the_loss_and_raises_the_accuracy():
    federation = make_federation([30] * 6, SHAPE)
    first, *_, final = [p.records[0] for p in play([run_of(federation, rounds=6, lr=0.01, aggregator="gma")])]
    assert final.train_loss < 0.5 * first.train_loss
    assert final.scores["test"]["accuracy"] > 0.8
    assert 0 < final.mask_mean < 1


def test_evaluation_comes_every_so_many_rounds_and_at_the_end():
    federation = make_federation(UNEVEN, SHAPE)
    rounds = list(play([run_of(federation, rounds=5, evaluate_every=2)]))
    assert [bool(p.records[0].scores) for p in rounds] == [False, True, False, True, True]


def test_a_fleet_takes_runs_with_several_training_pools():
    first, second = make_federation(UNEVEN, SHAPE, seed=0), make_federation(UNEVEN, SHAPE, seed=1)
    second = PlainFederation(second.train, make_pool(50, SHAPE, seed=5), second.clients)
    specs = [run_of(f, seed=4) for f in (first, second)]
    both = last(specs, trainer="lanes")
    for run, spec in enumerate(specs):
        alone = last([spec], trainer="lanes")
        assert relative_distance(alone.state.params[0], both.state.params[run]) < 1e-5
        assert alone.records[0].scores["test"]["loss"] == pytest.approx(
            both.records[run].scores["test"]["loss"], rel=1e-4
        )


@pytest.mark.parametrize("name", ["damped_mean", "shuffled_mask"])
def test_a_control_masks_as_the_rule_of_its_name(name):
    federation = make_federation(UNEVEN, SHAPE)
    spec = run_of(federation, aggregator=name, rounds=1, seed=5)
    fleet = assemble([spec, replace(spec, rule=fedgma.masked_mean(0.4))], trainer="loop")
    before = start(fleet)
    after, _ = play_round(fleet, before)
    lane_batch, weights = lay_lane_batch(fleet, before, [(0, int(client)) for client in sample_clients(spec, 1)])
    own = {name: value[:1] for name, value in unflatten(before.params, fleet.shapes).items()}
    updates = fleet.train(Assignment(fleet.model, lane_batch, fleet.pools, own, {})).updates
    controls = {"damped_mean": fedgma.damped_mean(0.4), "shuffled_mask": fedgma.shuffled_mask(0.4, seed=5)}
    wanted = controls[name](updates, weights.tolist()).update
    moved = {name: value[0] for name, value in unflatten(after.params - before.params, fleet.shapes).items()}
    for entry, value in wanted.items():
        assert torch.allclose(moved[entry], value, rtol=1e-4, atol=1e-7)
    assert relative_distance(after.params[0], after.params[1]) > 1e-6  # the control is not the mask itself


def test_a_stopped_run_goes_on_with_the_mask_of_the_round_before():
    federation = make_federation(UNEVEN, SHAPE)
    specs = [run_of(federation, aggregator=name, rounds=3, seed=5) for name in ("stale_mask", "mean")]
    fleet = assemble(specs, trainer="loop")
    state = start(fleet)
    for _ in range(2):
        state, _ = play_round(fleet, state)
    whole, _ = play_round(fleet, state)
    exported = [export(fleet, state, run) for run in range(2)]
    names = [[key for key in one if key.startswith("rule/before/")] for one in exported]
    assert [len(found) for found in names] == [len(fleet.shapes), 0]
    again, _ = play_round(fleet, restore(fleet, exported))
    assert torch.equal(whole.params, again.params)
    forgetful = [{**exported[0], **{key: exported[0][key] * 0 + 1 for key in names[0]}}, exported[1]]
    forgotten, _ = play_round(fleet, restore(fleet, forgetful))
    assert not torch.equal(whole.params[0], forgotten.params[0])


def test_an_averaged_server_trains_the_same_model_and_evaluates_the_average():
    spec = run_of(make_federation(UNEVEN, SHAPE), rounds=2, seed=5)
    fleet = assemble([spec, replace(spec, optimizer=fedgma.averaged(spec.optimizer, 0.75))], trainer="loop")
    first = start(fleet)
    state, _ = play_round(fleet, first)
    torch.testing.assert_close(state.moments.average[1], state.params[1], rtol=0, atol=0)
    again = restore(fleet, [export(fleet, state, run) for run in range(2)])
    for middle in (state, again):
        end, played = play_round(fleet, middle)
        assert torch.equal(end.params[0], end.params[1])
        wanted = (0.75 * state.params[0] + end.params[0]) / 1.75
        torch.testing.assert_close(end.moments.average[1], wanted)
        assert played.records[0].scores["test"] != played.records[1].scores["test"]


def test_an_average_whose_state_does_not_say_how_many_models_it_holds_goes_on_as_after_many_rounds():
    spec = run_of(make_federation(UNEVEN, SHAPE), rounds=2, seed=5)
    fleet = assemble([replace(spec, optimizer=fedgma.averaged(spec.optimizer, 0.75))], trainer="loop")
    state, _ = play_round(fleet, start(fleet))
    held = {key: array for key, array in export(fleet, state, 0).items() if key != "averaged/models"}
    end, _ = play_round(fleet, restore(fleet, [held]))
    torch.testing.assert_close(end.moments.average, 0.75 * state.moments.average + 0.25 * end.params)


def test_runs_of_differently_coloured_federations_share_a_fleet():
    mini = load("fmnist-mini")
    parts = iid(mini.train.y[:60], 6)
    colours = [Colour(), Colour(jitter=0.5), Colour()]
    federations = [federate(mini, parts, shift=shift, seed=3) for shift in colours]
    fleet = assemble([run_of(one, rounds=1) for one in federations], trainer="lanes")
    assert len(fleet.pools) == 2
    assert fleet.pool.tolist() == [0, 1, 0]
    together, _ = play_round(fleet, start(fleet))
    alone = last([fleet.specs[1]], trainer="lanes").state
    assert relative_distance(alone.params[0], together.params[1]) < 1e-5


def test_what_paired_runs_draw_alike_is_drawn_once():
    federation = make_federation(UNEVEN, SHAPE)
    arms = [{"tau": 0.0}, {"tau": 0.9}, {"lr": 0.1}, {"local_epochs": 2}]
    specs = [run_of(federation, seed=seed, **arm) for seed in range(2) for arm in arms]
    fleet = assemble(specs, trainer="lanes")
    state = start(fleet)
    lanes = [(run, int(client)) for run, spec in enumerate(specs) for client in sample_clients(spec, 1)]
    lane_batch, weights = lay_lane_batch(fleet, state, lanes)
    assert len(lane_batch.orders) == 2 * 4 * 2  # seeds x clients x numbers of epochs
    assert weights.tolist() == [len(federation.clients[client]) for _, client in lanes]
    for lane, (run, client) in enumerate(lanes):
        alone, _ = lay_lane_batch(fleet, state, [(run, client)])
        steps = alone.counts.shape[1]
        assert np.array_equal(lane_batch.index[lane, :steps], alone.index[0])
        assert np.array_equal(lane_batch.counts[lane, :steps], alone.counts[0])
        assert not lane_batch.counts[lane, steps:].any()
        assert lane_batch.seeds[lane] == alone.seeds[0]


def test_some_lanes_of_a_batch_keep_their_batches():
    federation = make_federation(UNEVEN, SHAPE)
    fleet = assemble([run_of(federation, seed=seed) for seed in (0, 0, 1)], trainer="lanes")
    lane_batch, _ = lay_lane_batch(fleet, start(fleet), [(0, 2), (1, 2), (2, 5), (0, 3), (1, 3)])
    part = lane_batch.take(np.array([4, 2, 3]))
    steps = part.counts.shape[1]
    assert len(part.orders) == 2
    assert np.array_equal(part.index, lane_batch.index[[4, 2, 3], :steps])
    assert np.array_equal(ship_batches(part, torch.device("cpu")).numpy(), part.index.transpose(1, 0, 2))


def test_a_round_that_was_sent_reads_the_same():
    federation = replace(make_federation(UNEVEN, SHAPE), client_tests=tuple(np.split(np.arange(60), 6)))
    specs = [run_of(federation, seed=s, aggregator=a, mask_every=1, per_client=True) for s, a in SENT]
    fleet = assemble(specs)
    state = start(fleet)
    for _ in range(2):
        state, played = play_round(fleet, state)
        for first, second in zip(played.records, played.sent().records, strict=True):
            accuracies, others = first.client_scores, second.client_scores
            assert accuracies.dtype == others.dtype
            assert np.array_equal(accuracies, others)
            assert first._replace(client_scores=None) == second._replace(client_scores=None)


def test_the_first_rounds_are_those_in_which_nothing_is_compiled_however_a_run_came_to_them():
    specs = [run_of(make_federation(UNEVEN, SHAPE), rounds=4, seed=seed) for seed in range(2)]
    fleet, called = assemble(specs, trainer="lanes", compile_after=2), []

    def noted(name, function):
        def call(*arguments):
            called.append(name)
            return function(*arguments)

        return call

    names = ("early", "train", "early_score", "score")
    fleet = replace(fleet, **{name: noted(name, getattr(fleet, name)) for name in names})
    states, rounds = [start(fleet)], []
    for _ in range(4):
        called.clear()
        states.append(play_round(fleet, states[-1])[0])
        rounds.append(set(called))
    assert rounds == [{"early", "early_score"}] * 2 + [{"train", "score"}] * 2
    for stop in (1, 2, 3):
        called.clear()
        state = restore(fleet, [export(fleet, states[stop], run) for run in range(2)])
        assert torch.equal(play_round(fleet, state)[0].params, states[stop + 1].params)
        assert set(called) == rounds[stop]


@pytest.mark.parametrize(
    ("settings", "chunk", "steps"),
    [
        *(({}, 99, (5, 8)), ({"local_epochs": 3}, 99, (15, 8)), ({}, 3, (15, 3))),
        ({"local_epochs": 3, "local_steps": 7}, 99, (7, 8)),
    ],
)
def test_steps_of_a_round_are_those_of_the_largest_client_for_each_chunk(settings, chunk, steps):
    federation = make_federation(UNEVEN, SHAPE)
    assert steps_of_a_round([run_of(federation), run_of(federation, **settings)], chunk) == steps


@pytest.mark.parametrize("model", ["logistic", Normalised])
def test_the_servers_part_alone_takes_the_step_of_a_whole_round(model):
    federation = make_federation([20, 13, 30, 8, 28, 40], SHAPE)  # no batch of one sample
    servers = [("gma", "sgd", 1.0), ("mean", "adam", 0.01), ("and_mask", "yogi", 0.01), ("soft", "momentum", 0.5)]
    # the third round, and others, take the longer way
    words = {"evaluate_every": 2, "mask_every": 3, "rounds": 5, "model": model}
    specs = [
        run_of(federation, seed=i, aggregator=name if name != "soft" else "gma", server=kind, server_lr=rate, **words)
        for i, (name, kind, rate) in enumerate(servers)
    ]
    fleet = assemble([*specs, replace(specs[0], rounds=2)], trainer="lanes")
    assert fleet.server is not None
    short, long = start(fleet), start(fleet)
    for _ in range(5):
        short, first = play_round(fleet, short)
        long, second = play_round(replace(fleet, server=None), long)
        assert torch.equal(short.params, long.params)
        assert torch.equal(short.moments.z, long.moments.z)
        assert torch.equal(short.moments.v, long.moments.v)
        assert short.buffers.keys() == long.buffers.keys()
        assert all(torch.equal(value, long.buffers[name]) for name, value in short.buffers.items())
        assert short.rounds.tolist() == long.rounds.tolist()
        assert repr(first.records) == repr(second.records)


@pytest.mark.parametrize(
    "more",
    [{"aggregator": "wiener"}, {"aggregator": "median"}, {"scaffold": True}, {"norm_factor": 2.0}],
    ids=str,
)
def test_a_round_that_needs_more_than_the_servers_part_takes_the_longer_way(more):
    federation = make_federation(UNEVEN, SHAPE)
    assert assemble([run_of(federation), run_of(federation, **more)], trainer="lanes").server is None
