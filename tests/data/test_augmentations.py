"""Crops and flips: the same draw for every trainer, another one in every round, none in evaluation."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedgma.data.augmentations import (
    BORDER,
    MIDDLE,
    OFFSETS,
    VARIANTS,
    CropFlip,
    augment_pool,
    crop_and_flip,
    draw_variants,
)
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import iid
from fedgma.data.shifts import Colour
from fedgma.errors import ConfigError
from fedgma.simulation.fleet import assemble, lay_lane_batch, play, play_round, restore, start
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.state import export
from fedgma.training.evaluation import evaluate, run_forward, scorer
from fedgma.training.stacked import unflatten
from plain_pools import make_federation
from run_specs import make_spec, relative_distance

SEES = {"client": torch.tensor(0)}


@pytest.fixture(scope="module")
def images():
    mini = load("fmnist-mini")
    return federate(mini, iid(mini.train.y, 30, seed=0))


def run_of(federation, **settings):
    base = {
        "model": "logistic",
        "rounds": 2,
        "clients_per_round": 3,
        "batch_size": 16,
        "lr": 0.01,
        "augment": "crop_flip",
    }
    return make_spec(federation, **{**base, "local_steps": 3, "evaluate_every": 0, **settings})


def weights(specs, **options):
    *_, played = play(specs, **options)
    return played.state.params


def test_a_variant_is_a_crop_out_of_a_black_border_perhaps_flipped():
    x = torch.randint(1, 256, (2, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wide = F.pad(x, (BORDER,) * 4)
    found, _ = crop_and_flip(x, torch.ones(VARIANTS, dtype=torch.int64), torch.arange(VARIANTS))
    place = 0
    for row in range(OFFSETS):
        for column in range(OFFSETS):
            crop = wide[1, :, row : row + 6, column : column + 5]
            assert torch.equal(found[place], crop)
            assert torch.equal(found[place + 1], crop.flip(2))
            place += 2
    assert place == VARIANTS


def test_the_middle_variant_is_the_pool_itself(images):
    index = torch.tensor([[3, 7], [11, 0]])
    for first, second in zip(
        images.train.batch(index, **SEES), CropFlip(images.train).batch(index * VARIANTS + MIDDLE, **SEES), strict=True
    ):
        assert torch.equal(first, second)


def test_a_border_has_the_background_colour_of_its_client():
    mini = load("fmnist-mini")
    coloured = federate(mini, iid(mini.train.y, 30, seed=0), shift=Colour(coloring="foreground_background"))
    pool, index = coloured.train, torch.tensor([5])
    x, _ = CropFlip(pool).batch(index * VARIANTS, **SEES)  # moved by four pixels both ways
    grounds = pool.normalise(pool.apply_view(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), index, **SEES))
    torch.testing.assert_close(x[..., :BORDER, :], grounds[..., :BORDER, :])


def test_half_of_the_draws_only_flip_and_the_border_has_the_mean_colour(images):
    index = np.zeros((40, 50), np.int64)
    variant = draw_variants(index, "half_crop_flip", seed=0, round=1, client=3)
    assert np.isin(variant, (MIDDLE, MIDDLE + 1)).mean() == pytest.approx(0.5 + 0.5 / OFFSETS**2, abs=0.04)
    assert (variant % 2).mean() == pytest.approx(0.5, abs=0.04)
    pool = augment_pool(images.train, "half_crop_flip")
    plain, _ = images.train.batch(torch.tensor([5]), **SEES)
    moved, _ = pool.batch(torch.tensor([5 * VARIANTS]), **SEES)  # moved by four pixels both ways
    assert not moved[..., :BORDER, :].any()
    assert not moved[..., :BORDER].any()
    assert torch.equal(moved[..., BORDER:, BORDER:], plain[..., :-BORDER, :-BORDER])


@pytest.mark.parametrize("model", ["logistic", "lenet"])
def test_loop_lanes_and_engine_train_on_the_same_draws(images, model):
    loop, lanes, engine = (weights([run_of(images, model=model)], trainer=t) for t in ("loop", "lanes", "engine"))
    assert relative_distance(loop, lanes) < 1e-5
    assert relative_distance(loop, engine) < 1e-5
    assert relative_distance(loop, weights([run_of(images, model=model, augment="none")], trainer="loop")) > 1e-4


def test_a_run_draws_the_same_alone_in_a_fleet_and_resumed(images):
    specs = [run_of(images, seed=seed) for seed in range(3)]
    together = weights(specs, trainer="lanes")
    assert relative_distance(together[1:2], weights(specs[1:2], trainer="lanes")) < 1e-5
    fleet = assemble(specs, trainer="lanes")
    state, _ = play_round(fleet, start(fleet))
    state, _ = play_round(fleet, restore(fleet, [export(fleet, state, run) for run in range(3)]))
    assert torch.equal(state.params, together)


def test_every_round_client_and_sample_has_its_own_draw():
    index = np.zeros((2, 50), np.int64)
    draws = [draw_variants(index, "crop_flip", seed=0, round=r, client=c) for r, c in ((1, 1), (2, 1), (1, 2))]
    assert all((draw >= 0).all() and (draw < VARIANTS).all() for draw in draws)
    assert all(not np.array_equal(draws[0], other) for other in draws[1:])
    assert len(np.unique(draws[0])) > 50


def test_lanes_hold_the_samples_of_their_clients(images):
    fleet = assemble([run_of(images)], trainer="lanes")
    client = int(sample_clients(fleet.specs[0], 1)[0])
    lane_batch, _ = lay_lane_batch(fleet, start(fleet), [(0, client)])
    assert set((lane_batch.index // VARIANTS).ravel().tolist()) <= set(images.clients[client].tolist())


def test_evaluation_uses_the_original_images(images):
    spec = run_of(images, evaluate_every=1, evaluate_on=("test", "train"))
    *_, played = play([spec], trainer="lanes")
    fleet = assemble([spec], trainer="lanes")
    params = unflatten(played.state.params, fleet.shapes)
    for name, pool in (("test", images.test), ("train", images.train)):
        wanted = evaluate(scorer(run_forward(fleet.model.eval())), params, {}, pool).accuracy.item()
        assert played.records[0].scores[name]["accuracy"] == pytest.approx(wanted)


def test_augmentation_of_features_is_refused():
    features = make_federation([9, 8, 7], (6,))
    with pytest.raises(ConfigError, match=r"expects images of uint8 pixels, got float32 of shape \(6,\); use augment"):
        assemble([run_of(features)])
    assert augment_pool(features.train, "none") is features.train


def test_unknown_and_mixed_augmentations_are_refused(images):
    with pytest.raises(ConfigError, match="unknown augmentation 'blur'; known: none, crop_flip, half_crop_flip"):
        run_of(images, augment="blur")
    with pytest.raises(ConfigError, match="must share task, model, batch_size, augment"):
        assemble([run_of(images), run_of(images, augment="none")])
