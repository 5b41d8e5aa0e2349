"""What surrounds the steps of a lane in threads gives the bits of the plain loop's parts."""

import pytest
import torch
from torch import nn

from fedgma.data.augmentations import augment_pool
from fedgma.data.client_views import Rotated
from fedgma.data.pools import ImagePool
from fedgma.training import loop
from fedgma.training.loop import PLAIN, Means
from fedgma.training.tasks import CLASSIFICATION, REGRESSION
from fedgma.training.threads import light_parts
from fedgma.training.threads.light_parts import LIGHT, LateMeans
from lane_twins import make_lane_batch
from plain_pools import make_federation

CPU = torch.device("cpu")
ANGLES = Rotated(torch.tensor([10.0, 20.0, 30.0, 40.0]))


def image_pool(samples, augment="none", view=None):
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (samples, 3, 4, 4), dtype=torch.uint8, generator=draw)
    y, numbers = torch.randint(0, 5, (samples,), generator=draw), torch.full((3, 1, 1), 0.3)
    return augment_pool(ImagePool(x, y, 5, torch.zeros_like(y), numbers, numbers + 0.1, view), augment)


@pytest.mark.parametrize("at_once", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    "pool",
    [None, image_pool(44), image_pool(44, "crop_flip"), image_pool(44, view=ANGLES)],
    ids=["features", "images", "crops", "rotated"],
)
def test_batches_are_those_that_are_made_alone_and_begin_where_torch_allocates(monkeypatch, pool, at_once):
    monkeypatch.setattr(light_parts, "AT_ONCE", at_once)
    federation = make_federation([9, 3, 17, 15], (5,))
    lane_batch, seen = make_lane_batch(federation, range(4), batch=4, epochs=2, lr=[0.1, 0.2] * 10), []
    for lane in range(4):
        plain, light = (list(way.batches(lane_batch, lane, pool or federation.train)) for way in (PLAIN, LIGHT))
        assert len(plain) == len(light) == lane_batch.steps[lane]
        for (x, y, lr), (same_x, same_y, same_lr) in zip(plain, light, strict=True):
            assert torch.equal(x, same_x)
            assert torch.equal(y, same_y)
            assert lr == same_lr
            assert same_x.stride() == x.stride()
            assert same_x.data_ptr() % 64 == same_y.data_ptr() % 64 == 0
            seen.append(len(y))
    assert {1, 3, 4} == set(seen)


@pytest.mark.parametrize("batches", [0, 1, 32, 70])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_means_of_many_batches_are_added_in_their_order(batches, kind):
    draw, both = torch.Generator().manual_seed(2), (Means(CLASSIFICATION, CPU), LateMeans(CLASSIFICATION, CPU))
    for number in range(batches):
        output = torch.randn(1 + number % 5, 3, generator=draw, dtype=kind, requires_grad=True)
        y = torch.randint(0, 3, (len(output),), generator=draw)
        for means in both:
            means.add(nn.functional.cross_entropy(output, y), output, y)
    (loss, hits), (late_loss, late_hits) = (means.of_lanes([means]) for means in both)
    assert torch.equal(loss, late_loss)
    assert torch.equal(hits, late_hits)
    assert loss.dtype == late_loss.dtype
    assert not late_loss.requires_grad


def test_a_loss_that_is_not_finite_and_measures_of_other_tasks_are_the_same():
    for task, output, y in [
        (CLASSIFICATION, torch.full((4, 3), float("inf")), torch.zeros(4, dtype=torch.int64)),
        (REGRESSION, torch.randn(4, 2), torch.randn(4, 2)),
    ]:
        both = (Means(task, CPU), LateMeans(task, CPU))
        for means in both:
            for factor in (1.0, 3e38, 3e38):
                means.add(torch.tensor(factor), output, y)
        for first, second in zip(*(means.of_lanes([means]) for means in both), strict=True):
            assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_a_state_is_copied_by_name_also_where_weights_are_tied():
    tied = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    values = {name: torch.randn_like(value) for name, value in tied.named_parameters()}
    values["1.running_mean"], values["1.num_batches_tracked"] = torch.randn(3), torch.tensor(7)
    for load in (loop.load_state, light_parts.copy_state):
        nn.init.zeros_(tied[0].weight)
        load(tied, values)
        found = tied.state_dict()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert torch.equal(found["2.weight"], values["0.weight"])


@pytest.mark.parametrize("view", [None, ANGLES], ids=["plain", "rotated"])
def test_normalised_images_are_pixels_minus_mean_over_deviation(view):
    pool, index = image_pool(44, view=view), torch.tensor([[3, 1], [2, 3]])
    before, client = pool.x.clone(), torch.tensor([[0], [2]])
    images, _ = pool.batch(index, client)
    shown = pool.x[index].float() / 255 if view is None else pool.show(index, client)
    assert torch.equal(images, (shown - pool.mean) / pool.std)
    assert torch.equal(pool.x, before)
