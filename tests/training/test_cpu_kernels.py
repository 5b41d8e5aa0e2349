"""The compiled CPU kernels give what torch's autograd and torch.optim.SGD give."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedgma.errors import ConfigError, DataError
from fedgma.training.fast.cpu.clients import evaluate, images, tinted, train_clients, why_not

pytest.importorskip("numba", reason="the CPU kernels need numba (extra `fast`)")
torch = pytest.importorskip("torch", reason="the kernels are compared with torch (extra `sim`)")
nn, F = torch.nn, torch.nn.functional

SAMPLES = 45
MARGIN = 1e-6  # rounding moves an activation by a tenth of this


def lenet(sizes, classes):
    channels, height, width = sizes
    inputs = 16 * (height // 4 - 2) * (width // 4 - 2)
    return nn.ModuleList(
        [
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.Conv2d(6, 16, 5),
            nn.Linear(inputs, 120),
            nn.Linear(120, 84),
            nn.Linear(84, classes),
        ]
    )


def logistic(sizes, classes):
    return nn.ModuleList([nn.Linear(int(np.prod(sizes)), classes)])


def forward(net, x):
    """Logits, and how near the nearest max-pool tie or ReLU kink was: nearer than rounding, either side is right."""
    margins = []
    for layer in net[:-1]:
        x = layer(x if isinstance(layer, nn.Conv2d) else x.flatten(1))
        if isinstance(layer, nn.Conv2d):
            windows = F.unfold(x.flatten(0, 1)[:, None], 2, stride=2).topk(2, dim=1).values
            alive = windows[:, 0] > -MARGIN
            margins.append((windows[:, 0] - windows[:, 1])[alive].min().item())
            margins.append(windows[:, 0].abs().min().item())
            x = F.max_pool2d(torch.relu(x), 2)
        else:
            margins.append(x.abs().min().item())
            x = torch.relu(x)
    return net[-1](x.flatten(1)), min(margins, default=1.0)


def flat(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()


def reference(
    net, data, batches, *, lr, momentum=0.0, mu=0.0, clip=np.inf, correction=None, weight_decay=0.0, nesterov=False
):
    """One client by plain torch, from the network's weights: its update and the smallest margin met."""
    start = flat(net)
    words = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, **words)
    x, y = pixels(data), torch.tensor(data.y)
    smallest = 1.0
    for row, rate in zip(batches, np.broadcast_to(lr, (1, len(batches)))[0], strict=True):
        index = torch.from_numpy(row[row >= 0])
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.zero_grad()
        logits, margin = forward(net, x[index])
        smallest = min(smallest, margin)
        F.cross_entropy(logits, y[index]).backward()
        adjust(net, start, mu, clip, correction)
        optimizer.step()
    update = flat(net) - start
    nn.utils.vector_to_parameters(torch.from_numpy(start), net.parameters())
    return update, smallest


def adjust(net, start, mu, clip, correction):
    gradient = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
    gradient += mu * torch.from_numpy(flat(net) - start)
    nn.utils.vector_to_parameters(gradient, (view := [nn.Parameter(p.grad) for p in net.parameters()]))
    for p, g in zip(net.parameters(), view, strict=True):
        p.grad = g.detach()
    if clip < np.inf:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    if correction is not None:
        at = 0
        for p in net.parameters():
            p.grad += torch.from_numpy(correction[at : at + p.numel()]).view_as(p)
            at += p.numel()


def pixels(data):
    if len(data.tint):
        grey = data.bytes.reshape(-1, 1, *data.sizes[1:]) / np.float32(255)
        black, span = (data.tint[:, part, :, None, None] for part in (0, 1))
        return torch.from_numpy(black + grey * span)
    channels = np.repeat(np.arange(data.sizes[0]), data.sizes[1] * data.sizes[2])
    return torch.from_numpy(data.table[channels, data.bytes]).reshape(-1, *data.sizes)


def plan(rng, samples, batch, epochs):
    """Shuffled batches, the last of an epoch partial and padded with -1."""
    steps = -(-len(samples) // batch)
    rows = np.full((epochs, steps * batch), -1)
    for row in rows:
        row[: len(samples)] = rng.permutation(samples)
    return rows.reshape(-1, batch)


def problem(seed, sizes, classes, network=lenet):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    y = rng.integers(0, classes, SAMPLES)
    x = rng.integers(0, 256, (SAMPLES, *sizes)).astype(np.uint8)
    channels = sizes[0]
    return rng, network(sizes, classes), images(x, y, [0.3] * channels, [0.4] * channels)


def tinted_problem(seed, sizes, classes, network):
    """Grey images, each in two colours of its own."""
    channels = sizes[0]
    rng, net, grey = problem(seed, (1, *sizes[1:]), classes, lambda _, classes: network(sizes, classes))
    black, white = rng.random((2, SAMPLES, channels))
    x = grey.bytes.reshape(-1, 1, *sizes[1:])
    return rng, net, tinted(x, grey.y, black, white, np.linspace(0.4, 0.6, channels), np.linspace(0.2, 0.4, channels))


def compare(name, network, sizes, classes, batch, epochs=2, problem=problem, **settings):
    """Trains by both, on the first data that keep clear of every tie, and compares the updates."""
    for seed in range(60):
        rng, net, data = problem(seed, sizes, classes, network)
        batches = plan(rng, np.arange(SAMPLES), batch, epochs)
        want, margin = reference(net, data, batches, **settings)
        if margin > MARGIN:
            break
    else:
        pytest.fail("no data without a tie among 60 draws")
    fix = settings.pop("correction", None)
    got = train_clients(name, flat(net), data, [batches], classes=classes, corrections=fix, threads=1, **settings)
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(got.updates[0], want, rtol=1e-4, atol=1e-6)
    assert got.samples.tolist() == [epochs * SAMPLES]


@pytest.mark.parametrize("mu", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [10, 32, 33])
@pytest.mark.parametrize(("channels", "classes"), [(1, 10), (3, 62)])
def test_lenet_trains_as_in_torch(channels, classes, batch, momentum, mu):
    compare("lenet", lenet, (channels, 28, 28), classes, batch, lr=0.05, momentum=momentum, mu=mu)


def test_lenet_takes_larger_images():
    compare("lenet", lenet, (3, 32, 32), 10, 32, lr=0.05, momentum=0.9)


def test_lenet_takes_images_that_are_not_square():
    compare("lenet", lenet, (1, 28, 36), 10, 32, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("mu", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [10, 32, 33])
def test_logistic_regression_trains_as_in_torch(batch, momentum, mu):
    compare("logistic", logistic, (1, 28, 28), 10, batch, lr=0.05, momentum=momentum, mu=mu)


@pytest.mark.parametrize(("name", "network"), [("lenet", lenet), ("logistic", logistic)])
def test_clipping_and_correction_are_applied_as_in_torch(name, network):
    size = 61706 if name == "lenet" else 7850
    correction = np.random.default_rng(5).normal(0, 0.01, size).astype(np.float32)
    compare(name, network, (1, 28, 28), 10, 32, lr=0.05, momentum=0.9, mu=0.1, clip=0.2, correction=correction)


@pytest.mark.parametrize(("name", "network"), [("lenet", lenet), ("logistic", logistic)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_weight_decay_nesterov_and_a_rate_for_each_step_are_those_of_torch(name, network, nesterov):
    lr = np.linspace(0.05, 0.01, 4, dtype=np.float32)[None]
    compare(name, network, (1, 28, 28), 10, 32, lr=lr, momentum=0.9, weight_decay=0.1, nesterov=nesterov)


@pytest.fixture(scope="module")
def lane_batch():
    """Five clients of 4, 13, 0, 20 and 8 samples, each with rates of its own."""
    rng, net, data = problem(1, (1, 28, 28), 10)
    parts = np.split(np.arange(SAMPLES), [4, 17, 17, 37])
    batches = [plan(rng, part, 8, 2) for part in parts]
    rates = {"lr": np.linspace(0.01, 0.1, 5), "momentum": np.linspace(0, 0.9, 5), "mu": np.linspace(0.2, 0, 5)}
    return flat(net), data, batches, rates


def test_the_number_of_threads_changes_no_bit(lane_batch):
    params, data, batches, rates = lane_batch
    first, second, many = (
        train_clients("lenet", params, data, batches, classes=10, threads=threads, **rates) for threads in (1, 2, 7)
    )
    assert first.updates.tobytes() == second.updates.tobytes() == many.updates.tobytes()
    assert first.losses.tolist() == second.losses.tolist() == many.losses.tolist()


def test_a_client_trains_alone_as_in_company(lane_batch):
    params, data, batches, rates = lane_batch
    together = train_clients("lenet", params, data, batches, classes=10, **rates)
    for k in (0, 1, 3, 4):
        own = {name: values[k] for name, values in rates.items()}
        alone = train_clients("lenet", params, data, [batches[k]], classes=10, **own)
        assert alone.updates[0].tobytes() == together.updates[k].tobytes()


def test_clients_may_have_batches_of_different_sizes(lane_batch):
    params, data, batches, _ = lane_batch
    wide = np.arange(40)[None]
    small, large = (
        train_clients("lenet", params, data, [rows], classes=10, lr=0.1).updates[0] for rows in (batches[1], wide)
    )
    both = train_clients("lenet", params, data, [batches[1], wide], classes=10, lr=0.1, threads=1).updates
    assert small.tobytes() == both[0].tobytes()
    assert large.tobytes() == both[1].tobytes()


def test_a_client_without_samples_has_no_update(lane_batch):
    params, data, batches, rates = lane_batch
    result = train_clients("lenet", params, data, batches, classes=10, **rates)
    assert result.samples.tolist() == [8, 26, 0, 40, 16]
    assert not result.updates[2].any()
    assert result.updates[[0, 1, 3, 4]].any(axis=1).all()


def test_steps_of_padding_are_no_steps(lane_batch):
    params, data, batches, _ = lane_batch
    gaps = np.concatenate([np.full((2, 8), -1), batches[1], np.full((3, 8), -1)])
    settings = {"classes": 10, "lr": 0.05, "momentum": 0.9, "mu": 0.1}
    plain, padded = (train_clients("lenet", params, data, [rows], **settings) for rows in (batches[1], gaps))
    assert plain.updates.tobytes() == padded.updates.tobytes()


def test_clients_may_start_from_weights_of_their_own(lane_batch):
    params, data, batches, _ = lane_batch
    starts = np.stack([params, params * np.float32(0.5)])
    both = train_clients("lenet", starts, data, [batches[1]] * 2, classes=10, lr=0.1)
    second = train_clients("lenet", starts[1], data, [batches[1]], classes=10, lr=0.1)
    assert both.updates[1].tobytes() == second.updates[0].tobytes()
    assert both.updates[0].tobytes() != both.updates[1].tobytes()


@pytest.mark.long(8)  # it compiles what many tests then read from numba's cache
@pytest.mark.parametrize("network", ["lenet", "logistic"])
def test_floats_train_as_the_bytes_they_stand_for(network):
    rng, net, data = problem(2, (1, 28, 28), 10, lenet if network == "lenet" else logistic)
    floats = images(pixels(data).numpy(), data.y)
    batches = [plan(rng, np.arange(SAMPLES), 32, 1)]
    a, b = (train_clients(network, flat(net), seen, batches, classes=10, lr=0.1).updates for seen in (data, floats))
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("name", "network"), [("lenet", lenet), ("logistic", logistic)])
def test_tinted_images_train_as_the_colours_they_stand_for(name, network):
    compare(name, network, (3, 28, 28), 10, batch=32, lr=0.1, problem=tinted_problem)
    _, net, data = tinted_problem(3, (3, 28, 28), 10, network)
    loss, _ = evaluate(name, flat(net), data, classes=10)
    logits = forward(net, pixels(data))[0].detach()
    assert loss == pytest.approx(F.cross_entropy(logits, torch.tensor(data.y)).item(), rel=1e-5)


@pytest.mark.long(6)
@pytest.mark.parametrize("network", ["lenet", "logistic"])
def test_evaluation_gives_the_loss_and_hits_of_torch(network):
    _, net, data = problem(3, (1, 28, 28), 10, lenet if network == "lenet" else logistic)
    index = np.array([4, 4, 0, 44, 17])
    logits, y = forward(net, pixels(data))[0].detach(), torch.tensor(data.y)
    for chosen in (np.arange(SAMPLES), index):
        loss, hits = evaluate(network, flat(net), data, classes=10, index=chosen, threads=2)
        assert loss == pytest.approx(F.cross_entropy(logits[chosen], y[chosen]).item(), rel=1e-5)
        assert hits == (logits[chosen].argmax(1) == y[chosen]).sum().item()


def test_evaluation_does_not_depend_on_the_threads():
    _, net, data = problem(4, (1, 28, 28), 10)
    index = np.arange(3000) % SAMPLES
    first, second = (evaluate("lenet", flat(net), data, classes=10, index=index, threads=n) for n in (1, 2))
    assert first == second


def test_training_loss_and_accuracy_are_those_met_on_the_way():
    _, net, data = problem(6, (1, 28, 28), 10)
    result = train_clients("lenet", flat(net), data, [np.arange(SAMPLES)[None]], classes=10, lr=0.1)
    loss, hits = evaluate("lenet", flat(net), data, classes=10)
    assert result.losses[0] == pytest.approx(loss, rel=1e-6)
    assert result.accuracies[0] == pytest.approx(hits / SAMPLES)


def test_a_client_that_diverges_is_seen_to_diverge(lane_batch):
    params, data, batches, _ = lane_batch
    result = train_clients("lenet", params, data, [batches[3]], classes=10, lr=1e30)
    assert not np.isfinite(result.updates).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "vgg"}, "no CPU kernel for 'vgg'; known: lenet, logistic"),
        ({"params": np.zeros(5, np.float32)}, r"params must have shape \(61706,\) or \(1, 61706\), got \(5,\)"),
        ({"batches": [np.array([[SAMPLES]])]}, r"batches\[0\] must be \[step, batch\] of sample numbers below 45"),
        ({"batches": [np.array([3])]}, r"batches\[0\] must be \[step, batch\]"),
        ({"data": images(np.zeros((45, 1, 28, 28), np.uint8), np.full(45, 10))}, "labels must be 0 to 9, got 10 to 10"),
        ({"lr": np.ones(2)}, "lr must be a number or one for each of 1 clients"),
        ({"lr": np.ones((1, 0))}, r"lr must be \[client, step\] for 1 clients and 2 steps"),
    ],
)
def test_a_mistake_is_named(lane_batch, change, message):
    params, data, batches, _ = lane_batch
    call = {"network": "lenet", "params": params, "data": data, "batches": batches[:1], "classes": 10, "lr": 0.1}
    with pytest.raises((ConfigError, DataError), match=message):
        train_clients(**{**call, **change})


def test_images_of_another_kind_are_refused():
    with pytest.raises(DataError, match="uint8 or float32"):
        images(np.zeros((2, 1, 28, 28)), np.zeros(2, int))
    with pytest.raises(DataError, match="as many labels"):
        images(np.zeros((2, 1, 28, 28), np.uint8), np.zeros(3, int))
    assert "multiples of 4" in why_not("lenet", (1, 30, 28))


def test_without_numba_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "pip install 'fedgma[fast]'" in why_not("lenet", (1, 28, 28))


def test_an_edit_of_any_kernel_source_is_part_of_the_cache_key():
    from fedgma.training.fast.cpu import lenet as lenet_cpu
    from fedgma.training.fast.cpu.simd import source_files, sources_number

    assert {"simd.py", "layers.py", "lenet.py", "logistic.py"} <= {path.name for path in source_files()}
    kept = [cell.cell_contents for cell in lenet_cpu.train.py_func.__closure__]
    assert kept == [sources_number()]


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86 family")
def test_processors_without_wide_registers_get_the_same_results():
    environment = dict(os.environ, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+sse4.2")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "trains_as_in_torch and 32", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
