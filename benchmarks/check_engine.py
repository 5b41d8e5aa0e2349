"""Does the engine compute what the loop computes, on this device? A self-check for machines with a GPU.

    python benchmarks/check_engine.py            # all models, algorithms, precisions; prints one line each

Every line trains the same lanes with the loop and with the engine and prints how far the updates are apart, relative to
their length; then resume, repeatability and dropout are tried. The last line says how many failed.
"""

import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from workloads import BOUND, WORKLOADS, Images, header, lane_updates, make_images, parser, plain_cnn, spec_of

from fedgma.aggregation.optimizers import yogi
from fedgma.aggregation.rules import masked_mean
from fedgma.errors import FedgmaError
from fedgma.simulation.algorithms import fedprox, fedsmoo, mofedsam, scaffold
from fedgma.simulation.fleet import assemble, play, play_round, restore, start
from fedgma.simulation.state import export

ALGORITHMS = {
    "fedavg": {},
    "prox": {"algorithm": fedprox(0.1)},
    "clip": {"gradient_clip": 0.5},
    "scaffold": {"algorithm": scaffold(), "client_learning_rate": 0.01},
    "mofedsam": {"algorithm": mofedsam(), "client_learning_rate": 0.01},
    "fedsmoo": {"algorithm": fedsmoo(), "client_learning_rate": 0.01},
    "yogi": {"optimizer": yogi(0.01)},
}


def federation(name: str, device: str, ragged: bool) -> Images:
    images = make_images(WORKLOADS[name], device, clients=12)
    size = 40 if name == "resnet" else 75
    cut = [part[: size - 7 * client if ragged and client % 2 else size] for client, part in enumerate(images.clients)]
    return Images(images.train, images.test, tuple(np.asarray(part) for part in cut if len(part) > 1))


def weights(specs, **options) -> torch.Tensor:
    *_, played = play(specs, compile_after=0, **options)
    return played.state.params


def compare(name: str, device: str, algorithm: str, ragged: bool, **options) -> tuple[float, float]:
    """Middle and largest relative distance of the lanes' updates in round 2; of the final weights if logistic."""
    work, images = WORKLOADS[name], federation(name, device, ragged)
    model = plain_cnn if name == "pfl" else options.pop("model", work.model)
    settings = {"model": model, "rounds": 3, "clients_per_round": 5, "batch_size": 16, **ALGORITHMS[algorithm]}
    specs = [spec_of(work, images, **{**settings, "seed": seed, "rule": masked_mean(0.4 * seed)}) for seed in range(2)]
    slow, fast = assemble(specs, trainer="loop"), assemble(specs, trainer="engine", compile_after=0, **options)
    if name == "logistic":
        expected, actual = (weights(specs, trainer=kind, **more) for kind, more in (("loop", {}), ("engine", options)))
    else:
        state, _ = play_round(slow, start(slow))
        expected, actual = (lane_updates(fleet, state) for fleet in (slow, fast))
    off = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    return off.median().item(), off.max().item()


def repeats_and_resumes(device: str) -> float:
    """How far a repeated and a resumed fleet are from the first: 0 where they are the same to the bit."""
    work, images = WORKLOADS["W1"], federation("W1", device, True)
    algorithms = (fedprox(0.1), scaffold(), fedsmoo())
    specs = [
        spec_of(work, images, rounds=4, clients_per_round=5, seed=seed, algorithm=algorithm)
        for seed, algorithm in enumerate(algorithms)
    ]
    first, again = weights(specs, trainer="engine"), weights(specs, trainer="engine")
    fleet = assemble(specs, trainer="engine", compile_after=0)
    state = start(fleet)
    for _ in range(2):
        state, _ = play_round(fleet, state)
    state = restore(fleet, [export(fleet, state, run) for run in range(3)])
    for _ in range(2):
        state, _ = play_round(fleet, state)
    return max((first - again).abs().max().item(), (first - state.params).abs().max().item())


def dropout_differs(device: str) -> float:
    """0 where dropout repeats with its seed and differs with another."""
    work, images = WORKLOADS["pfl"], federation("pfl", device, False)
    first, second, other = (
        weights([spec_of(work, images, rounds=2, clients_per_round=5, seed=seed, batch_size=16)], trainer="engine")
        for seed in (0, 0, 1)
    )
    return float(not torch.equal(first, second)) + float(torch.equal(first, other))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", default=["W1", "pfl", "logistic", "resnet"])
    made.add_argument("--quick", action="store_true", help="one algorithm a model, no ResNet")
    arguments = made.parse_args()
    print(header(arguments.device))
    models = [name for name in arguments.models if not (arguments.quick and name == "resnet")]
    names = ["fedavg"] if arguments.quick else list(ALGORITHMS)
    cases = [(m, a, r, {}) for m in models for a in names for r in (False, True) if m != "resnet" or a == "fedavg"]
    cases += [(m, "fedavg", True, {"form": False}) for m in models if m != "resnet"]
    cases += [(m, "fedavg", False, {"precision": p}) for m in models for p in ("tf32", "bf16")]
    if "resnet" in models:
        batch = {"model": "resnet18-bn"}
        cases += [
            ("resnet", "fedavg", True, {**batch, **more}) for more in ({}, {"precision": "bf16"}, {"form": False})
        ]
    failed = sum(not case(arguments.device, *one) for one in cases)
    for check in (repeats_and_resumes, dropout_differs):
        off = check(arguments.device)
        failed += off != 0
        print(f"{check.__name__:50} off {off:.1e} {'ok' if off == 0 else 'FAILED'}", flush=True)
    print(f"{failed} failed of {len(cases) + 2}")
    sys.exit(failed > 0)


def case(device: str, name: str, algorithm: str, ragged: bool, options: dict[str, object]) -> bool:
    text = f"{name} {algorithm} {'ragged' if ragged else 'even'} {options or ''}"
    begun = time.perf_counter()
    try:
        off, most = compare(name, device, algorithm, ragged, **options)
    except (RuntimeError, FedgmaError, ValueError, TypeError, AssertionError):
        traceback.print_exc(limit=-3)
        print(f"{text:50} FAILED", flush=True)
        return False
    good = off < BOUND[str(options.get("precision", "fp32"))]
    seconds = time.perf_counter() - begun
    print(f"{text:50} off {off:.1e}, at most {most:.1e} {seconds:5.1f} s {'ok' if good else 'FAILED'}", flush=True)
    return good


if __name__ == "__main__":
    main()
