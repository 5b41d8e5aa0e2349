"""A clock: without delays nothing changes, and with them the events are those of a literal simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgma
import literal_clock
from fedgma.aggregation.optimizers import server_optimizer
from fedgma.errors import ConfigError
from fedgma.seeds import generator
from fedgma.simulation.algorithms import ALGORITHMS, Algorithm
from fedgma.simulation.attacks import Attack
from fedgma.simulation.clock import Clock, Delays, durations, present, samples_trained
from fedgma.simulation.fleet import assemble, lay_lane_batch, play, play_round, restore, start
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from fedgma.simulation.timeline import START, RunClock, buffered, pick, synchronous
from fedgma.training.batches import batch_order
from fedgma.training.lane_batch import Assignment
from fedgma.training.stacked import unflatten
from plain_pools import make_federation

FEDERATION = make_federation([20, 13, 30, 8, 25, 40, 9, 16], (1, 4, 4), classes=3)
SLOW = {"compute": Delays("lognormal", 0.1, 1.0), "network": Delays("exponential", 1.0)}
HARD = {**SLOW, "dropout": 0.2, "deadline": 6.0, "away": 0.2, "away_seconds": 5.0}
ASYNCHRONOUS = Clock(**SLOW, concurrency=5)


def run_of(clock=None, **settings):
    words = {"model": "logistic", "rounds": 4, "clients_per_round": 3, "batch_size": 8, "evaluate_every": 0, "seed": 1}
    return RunSpec(FEDERATION, clock=clock, **{**words, **settings})


def played(specs, **options):
    """All rounds of a fleet and its last state."""
    rounds = list(play(specs, **options))
    return rounds, rounds[-1].state


def kinds():
    """One run for each algorithm, with rules and attacks among them."""
    rules = [fedgma.masked_mean(0.4), fedgma.mean(), fedgma.median(), fedgma.clipped(fedgma.masked_mean(0.6), 0.5)]
    for place, row in enumerate(ALGORITHMS.values()):
        yield run_of(
            rounds=2,
            algorithm=row.make(),
            optimizer=server_optimizer(row.server, row.learning_rate, "after"),
            rule=rules[place % len(rules)],
            attack=Attack("sign_flip", 0.3, 1.0) if place % 3 == 0 else None,
            norm_factor=2.0 if place % 5 == 0 else None,
        )


def test_every_algorithm_has_the_same_bits_with_a_clock_that_delays_nothing():
    plain = list(kinds())
    on_time = Clock(compute=Delays("lognormal", 0.1, 1.0))  # slow clients, but the server waits for all
    clocked = [replace(spec, clock=(Clock(), on_time)[place % 2]) for place, spec in enumerate(plain)]
    _, state = played([*plain, *clocked])
    assert torch.equal(state.params[: len(plain)], state.params[len(plain) :])
    assert state.timelines[len(plain)].time == 0 < state.timelines[len(plain) + 1].time


def test_a_full_buffer_of_equal_clients_has_the_synchronous_bits():
    plain = [spec for spec in kinds() if spec.algorithm.keeps == "nothing" and not spec.algorithm.lookahead]
    clocks = [Clock(concurrency=3), Clock(concurrency=3, network=Delays(mean=2.0), voters="fresh")]
    _, state = played([*plain, *(replace(spec, clock=clock) for clock in clocks for spec in plain)])
    first, *others = state.params.split(len(plain))
    assert len(plain) == 7
    assert all(torch.equal(first, other) for other in others)
    assert state.timelines[2 * len(plain)].time == 4.0  # two rounds of two seconds
    assert not state.versions


@given(
    seed=st.integers(0, 10**6),
    wanted=st.integers(1, 5),
    more=st.integers(0, 3),
    dropout=st.sampled_from([0.0, 0.3]),
    away=st.sampled_from([0.0, 0.5]),
    network=st.sampled_from([Delays(), Delays(mean=1.0), Delays("exponential", 1.0), Delays("uniform", 2.0, 1.0)]),
    asynchronous=st.booleans(),
)
def test_events_are_those_of_a_literal_simulation(seed, wanted, more, dropout, away, network, asynchronous):
    number, rounds = 8, 5
    deadline = 4.0 if dropout or away else math.inf
    clock = Clock(
        compute=Delays("lognormal", 0.1, 1.0),
        network=network,
        dropout=dropout,
        away=away,
        away_seconds=2.5,
        deadline=deadline,
        over_sample=1.0 if asynchronous else (wanted + more) / wanted,
        concurrency=wanted + more if asynchronous else None,
    )
    work = np.arange(1, number + 1)
    run = RunClock(clock, seed, wanted, np.ones(number, bool), work)

    def duration(round, client, start):
        return durations(clock, seed, work, *((round, start) if start else (round,)))[client]

    def is_there(client, time):
        return bool(present(clock, seed, np.array([time]), np.array([client]))[0])

    sources = {}

    def choose(round, draw, candidates, count):
        if draw:
            source = sources.setdefault(round, generator(seed, "cohort", round, "again"))
            return pick(source, np.isin(np.arange(number), candidates), count).tolist()
        source = generator(seed, "cohort", round)
        return sorted(source.choice(candidates, min(count, len(candidates)), replace=False).tolist())

    is_there.seconds = clock.away_seconds
    shared = (range(number), wanted, wanted + more, deadline, duration, is_there, choose)
    line, found = START, []
    for round in range(1, rounds + 1):
        line, told = (buffered if asynchronous else synchronous)(run, line, round)
        pairs = list(zip(told.clients.tolist(), told.rounds.tolist(), strict=True))
        found.append((pairs if asynchronous else told.clients.tolist(), told.asked, told.time))
    assert found == (literal_clock.buffered if asynchronous else literal_clock.synchronous)(rounds, *shared)


@pytest.mark.parametrize("power", [0.5, 0.0])
def test_a_buffered_run_is_its_literal_form(power):
    """Every client trains from the model of its own version; its update is scaled, and votes with the others."""
    spec = run_of(replace(ASYNCHRONOUS, staleness_power=power), rounds=6, rule=fedgma.masked_mean(0.6))
    rounds, state = played([spec])
    fleet = assemble([replace(spec, clock=None)])
    fresh = start(fleet)
    models = [fresh.params]  # before each round
    for round, done in enumerate(rounds, 1):
        tally, told = fedgma.Tally(), done.attended[0]
        for client, started in zip(told.clients.tolist(), told.rounds.tolist(), strict=True):
            lane, samples = lay_lane_batch(fleet, fresh, [(0, client, started)])
            begin = unflatten(models[started - 1], fleet.shapes)
            flat = fleet.train(Assignment(fleet.model, lane, fleet.pools, begin, {})).flat[0]
            tally.add({"w": flat * np.float32((1 + round - started) ** -power)}, int(samples[0]))
        models.append(models[-1] + fedgma.finish(tally, tau=0.6).update["w"])
    assert max(int((done.attended[0].rounds < done.rounds[0]).sum()) for done in rounds) > 0
    assert torch.equal(state.params, models[-1])


def test_only_fresh_updates_vote_where_that_is_asked():
    """An older update counts in the mean, but is as a zero in the vote."""
    specs = [run_of(replace(ASYNCHRONOUS, voters=v), rounds=6, rule=fedgma.masked_mean(0.6)) for v in ("all", "fresh")]
    rounds, _ = played(specs)
    for done in rounds:
        told, records = done.attended[1], done.records
        fresh = (told.rounds == done.rounds[1]).mean()
        assert records[1].agreement <= fresh + 1e-6
        assert records[1].clients == records[0].clients == 3
    assert records[0].mask_mean != records[1].mask_mean


@pytest.mark.parametrize("trainer", ["lanes", "engine"])
def test_clients_of_several_versions_train_together(trainer):
    """In one lane batch, one by one, and in a fleet with runs of other clocks: the same bits."""
    specs = [run_of(), run_of(ASYNCHRONOUS, seed=2), run_of(Clock(**HARD, over_sample=2.0)), run_of(ASYNCHRONOUS)]
    _, state = played(specs, trainer=trainer)
    _, chunked = played(specs, trainer=trainer, chunk=2)
    _, alone = played(specs[3:], trainer=trainer)
    torch.testing.assert_close(chunked.params, state.params, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(alone.params[0], state.params[3], rtol=1e-5, atol=1e-7)
    assert state.timelines[1].time != state.timelines[3].time  # another seed, other delays


def test_a_stopped_run_continues_with_its_events_and_versions():
    specs = [run_of(Clock(**HARD, concurrency=6), rounds=6), run_of(rounds=6), run_of(Clock(**HARD), rounds=6)]
    rounds, state = played(specs)
    fleet = assemble(specs)
    now, most = start(fleet), 0
    for done in rounds:
        now, again = play_round(fleet, now)
        told = [[part.tolist() for part in map(np.asarray, entry.attended[0])] for entry in (again, done)]
        assert told[0] == told[1]
        now = restore(fleet, [export(fleet, now, run) for run in range(3)])
        most = max(most, len(now.versions))
        assert len(now.versions) <= len(now.timelines[0].clients)
    assert most > 0
    assert torch.equal(now.params, state.params)


def test_both_arms_of_a_comparison_have_the_same_delays():
    rules = [fedgma.mean(), fedgma.masked_mean(0.4)]
    rounds, _ = played([run_of(Clock(**HARD, concurrency=4), rule=rule, rounds=6) for rule in rules])
    for done in rounds:
        first, second = ([part.tolist() for part in map(np.asarray, done.attended[run])] for run in (0, 1))
        assert first == second


def test_a_delay_does_not_depend_on_who_else_is_asked():
    clock, work = Clock(**SLOW, dropout=0.5, deadline=9.0), np.arange(1, 101)
    taken = durations(clock, 3, work, 7)
    assert not np.array_equal(durations(clock, 4, work, 7), taken)
    assert not np.array_equal(durations(clock, 3, work, 8), taken)
    assert 0.3 < np.isinf(taken).mean() < 0.7
    speed = [durations(Clock(compute=clock.compute), 3, work, round) for round in (1, 2)]
    np.testing.assert_array_equal(*speed)  # a slow client stays slow


@pytest.mark.parametrize(
    ("delays", "mean", "low"),
    [
        (Delays("constant", 2.0), 2.0, 2.0),
        (Delays("uniform", 2.0, 0.5), 2.0, 1.0),
        (Delays("exponential", 2.0), 2.0, 0.0),
        (Delays("lognormal", 2.0, 0.5), 2.0, 0.0),
        (Delays(measured=(np.array([1.0]), np.array([2.0, 4.0]))), 2.0, 1.0),
    ],
)
def test_delays_have_their_mean(delays, mean, low):
    taken = durations(Clock(network=delays), 0, np.ones(20000), 1)
    assert abs(taken.mean() - mean) < 0.1
    assert taken.min() >= low


def test_as_many_measured_devices_as_clients_are_the_clients():
    devices = tuple(np.array([client, client + 0.5]) for client in range(8))
    taken = durations(Clock(network=Delays(measured=devices)), 0, np.ones(8), 1)
    np.testing.assert_array_equal(np.floor(taken), np.arange(8))


def test_answers_after_the_deadline_are_lost():
    spec = run_of(Clock(compute=Delays(mean=1.0), deadline=20.0))  # only clients of up to 20 samples answer in time
    rounds, _ = played([spec])
    for done in rounds:
        called = sample_clients(spec, int(done.rounds[0]))
        in_time = [client for client in called if len(FEDERATION.clients[client]) <= 20]
        assert done.sampled[0].tolist() == in_time
        assert done.records[0].clients == len(in_time)
        assert (done.attended[0].asked, done.attended[0].lost) == (3, 3 - len(in_time))


def test_a_round_that_nobody_reaches_changes_nothing_but_the_time():
    adam = server_optimizer("adam", 0.01, "after")
    specs = [run_of(Clock(compute=Delays(mean=1.0), deadline=0.5), algorithm=Algorithm(), optimizer=adam), run_of()]
    rounds, state = played(specs)
    assert torch.equal(state.params[0], start(assemble(specs)).params[0])
    assert not torch.equal(state.params[1], state.params[0])
    assert [done.records[0].clients for done in rounds] == [0, 0, 0, 0]
    assert state.timelines[0].time == 2.0


def test_of_those_asked_the_first_to_answer_are_counted():
    spec = run_of(Clock(compute=Delays(mean=1.0), over_sample=2.0))
    rounds, _ = played([spec])
    for done in rounds:
        called = sample_clients(replace(spec, clients_per_round=6, clock=None), int(done.rounds[0]))
        fastest = sorted(called, key=lambda client: len(FEDERATION.clients[client]))[:3]
        assert done.sampled[0].tolist() == sorted(fastest)
        assert done.attended[0].seconds == len(FEDERATION.clients[fastest[-1]])


def test_whom_the_server_picks_is_free_and_everybody_has_the_same_chance():
    source, free = np.random.default_rng(0), np.arange(40) % 10 == 3  # often nobody is found by trying
    picked = np.concatenate([pick(source, free, 1) for _ in range(4000)])
    chosen, counts = np.unique(picked, return_counts=True)
    assert chosen.tolist() == [3, 13, 23, 33]
    assert counts.min() > 850
    assert pick(source, free, 9).tolist() == [3, 13, 23, 33]
    assert pick(source, np.zeros(5, bool), 1).tolist() == []


def test_whoever_is_away_comes_back():
    clock = Clock(away=0.5, away_seconds=10.0, deadline=5.0)
    there = np.array([present(clock, 0, np.full(50, time), np.arange(50)) for time in np.arange(0.0, 1000.0, 5.0)])
    np.testing.assert_array_equal(there[0::2], there[1::2])  # for a whole stretch
    assert 0.4 < there.mean() < 0.6
    assert there.any(0).all()


@given(
    size=st.integers(0, 40),
    epochs=st.integers(1, 3),
    batch=st.integers(2, 9),
    steps=st.none() | st.integers(1, 20),
    least=st.integers(1, 2),
)
def test_the_work_of_a_client_is_what_its_batches_hold(size, epochs, batch, steps, least):
    key = {"seed": 0, "round": 1, "client": 0, "epochs": epochs, "batch": batch, "steps": steps, "least": least}
    _, counts = batch_order(np.arange(size), **key)
    words = {"epochs": epochs, "batch": batch, "steps": steps, "least": least}
    assert samples_trained(np.array([size]), **words).tolist() == [counts.sum()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dropout": 0.1}, "set clock.deadline"),
        ({"concurrency": 3, "over_sample": 2.0}, "for synchronous rounds only"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"voters": "some"}, "voters one of all, fresh"),
        ({"deadline": 0.0}, "a deadline above 0"),
        ({"away": 0.5, "away_seconds": 1e-9, "deadline": 1.0}, "away_seconds of at least"),
    ],
)
def test_a_clock_that_cannot_be_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        Clock(**words)


def test_runs_that_a_clock_does_not_fit_are_refused():
    with pytest.raises(ConfigError, match="synchronous clock"):
        run_of(ASYNCHRONOUS, algorithm=ALGORITHMS["scaffold"].make())
    with pytest.raises(ConfigError, match="9 clients at a time"):
        run_of(Clock(concurrency=9))
    with pytest.raises(ConfigError, match="at most 1"):
        Delays("uniform", 1.0, 2.0)
    with pytest.raises(ConfigError, match=r"lower clock\.away"):
        list(play([run_of(Clock(away=1 - 1e-9, deadline=1.0, concurrency=3))]))
    with pytest.raises(ConfigError, match="round 1 never ends"):
        list(play([run_of(Clock(compute=Delays(mean=1.0), deadline=0.1, concurrency=3))]))
