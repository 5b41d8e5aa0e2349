"""How long until the first round is done: from the start of the process, with an empty and with a filled kernel cache.

    python benchmarks/bench_start.py --models lenet mlp vgg          # on a GPU: a table, the plain loop in every row
    python benchmarks/bench_start.py --device cpu --tiny             # only shows that it runs

Every line is a process of its own. "cold" has empty folders for what torch, triton and the driver keep of compiled
kernels; "warm" has those that the cold process left. The plain loop, which compiles nothing, is started in the same way
between the two. Libraries have been read from the disk once before. A way is trainer[-precision]; "engine-compiled"
compiles before the first round.

Seconds are split into imports (until fedgma is imported), device (until the device has answered), data, building
(model, trainer, trial batches), and the first round with its evaluation. Of the first round, "kernels" is triton's
compiling (added up over threads), "compile" torch's, "capture" CUDA graphs. A process that fails or takes too long
loses its own line only. The last lines say what the goals are about: seconds beyond the plain loop's own start.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

BEGUN = time.time()
HERE = Path(__file__).parent
STAGES = ("imports", "device", "data", "building", "first round")
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "driver"}
READ = "import sys, torch; x = torch.ones(9, 9, device=sys.argv[1]); (x @ x).sum().item()"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--models", nargs="+", default=["lenet", "cnn", "resnet18-gn", "mlp", "vgg", "vit"])
    asked.add_argument("--ways", nargs="+", default=["engine"])
    asked.add_argument("--caches", nargs="+", default=["cold", "warm"], choices=["cold", "warm"])
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--rounds", type=int, default=20, help="after the first, to tell how long a later one takes")
    asked.add_argument("--limit", type=float, default=120.0, help="seconds for one process")
    asked.add_argument("--seconds", type=float, default=1e9, help="no process is started after so many")
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--profile", action="store_true", help="what the host did in the first round, on stderr")
    asked.add_argument("--out", type=Path)
    asked.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.child:
        child(*options.child, options)
    else:
        parent(options)


# the processes that are timed


def child(model: str, way: str, options: argparse.Namespace) -> None:
    """Play rounds, and tell on stdout when each stage was over."""
    told = {"begun": BEGUN}

    def over(stage: str) -> None:
        told[stage] = time.time()
        print(json.dumps({"stage": stage, "at": told[stage]}), flush=True)

    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    import torch

    from fedgma.simulation import fleet as fleets

    over("imports")
    torch.zeros(1, device=options.device).item()
    over("device")
    specs = specs_of(model, options.device, options.tiny)
    over("data")
    parts = watch()
    fleet = fleets.assemble(specs, **options_of(way))
    state = fleets.start(fleet)
    over("building")
    with profiled(options.profile):
        state, played = fleets.play_round(fleet, state)
        records = played.records  # waits
    over("first round")
    dynamo = "torch._dynamo" in sys.modules
    begun = time.perf_counter()
    for _ in range(options.rounds):
        state, played = fleets.play_round(fleet, state)
    loss = played.records[0].train_loss
    later = (time.perf_counter() - begun) / max(options.rounds, 1)
    found = {"ms": 1e3 * later, "loss": loss, "first loss": records[0].train_loss, "dynamo": dynamo, **parts}
    print(json.dumps({"done": found}), flush=True)


def specs_of(model: str, device: str, tiny: bool) -> list:
    """One run of ten clients; that of `bench_engine.py` for the library's models, of `bench_modules.py` for others."""
    from dataclasses import replace

    from workloads import WORKLOADS, make_images, spec_of

    names = {"lenet": "W1", "cnn": "cnn", "resnet18-gn": "resnet"}
    if model in names:
        work = WORKLOADS[names[model]]
        if tiny:
            work = replace(work, clients=4, clients_per_round=2, batch=4, samples=12)
        return [spec_of(work, make_images(work, device), evaluate_every=int(not tiny))]
    import bench_modules

    own = {
        "mlp": "MLP with batch norm",
        "vgg": "VGG",
        "vit": "ViT, attention written out",
        "ready-vit": "ViT, TransformerEncoderLayer",
        "gpt": "GPT",
    }
    return [replace(spec, evaluate_every=int(not tiny)) for spec in bench_modules.specs_of(own[model], device, tiny)]


def options_of(way: str) -> dict[str, object]:
    """The plain loop is torch's alone, evaluation too."""
    trainer, *words = way.split("-")
    options: dict[str, object] = {"trainer": trainer, "form": trainer != "loop"}
    for word in words:
        options |= {"compile_after": 0} if word == "compiled" else {"precision": word}
    return options


def watch() -> dict[str, float]:
    """Seconds of compiling kernels and of capturing, counted from now on."""
    from fedgma.training.cuda_graphs import Engine

    spent = {"kernels": 0.0, "captures": 0.0, "prepared": 0.0}

    def timed(name: str, key: str) -> None:
        plain = getattr(Engine, name)

        def call(*arguments, **named):
            begun = time.perf_counter()
            try:
                return plain(*arguments, **named)
            finally:
                spent[key] += time.perf_counter() - begun

        setattr(Engine, name, call)

    timed("_captured", "captures")
    timed("_prepare", "prepared")
    try:
        import triton

        def heard(*, times, cache_hit, **_):
            spent["kernels"] += 0 if cache_hit else times.total / 1e6

        triton.knobs.compilation.listener = heard
    except (ImportError, AttributeError):
        traceback.print_exc(limit=1)
    return spent


class profiled:
    """Inside, the host's calls are counted; the costliest are printed on stderr."""

    def __init__(self, wanted: bool) -> None:
        import cProfile

        self.profile = cProfile.Profile() if wanted else None

    def __enter__(self) -> None:
        if self.profile is not None:
            self.profile.enable()

    def __exit__(self, *_) -> None:
        if self.profile is not None:
            import pstats

            self.profile.disable()
            pstats.Stats(self.profile, stream=sys.stderr).sort_stats("cumulative").print_stats(45)


# the process that starts and times them


def parent(options: argparse.Namespace) -> None:
    """Start every process in turn and print its line."""
    print(f"{time.strftime('%Y-%m-%d')}, seconds from the start of the process\n")
    print(
        "| model | way | cache | "
        + " | ".join(STAGES)
        + " | kernels | capture | compile | together | then, ms a round |"
    )
    print("| --- " * (len(STAGES) + 8) + "|", flush=True)
    subprocess.run([sys.executable, "-c", READ, options.device], check=False, timeout=options.limit)
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            lines = [(way, cache) for cache in options.caches for way in options.ways]
            lines.insert(len(options.ways), ("loop", "-"))
            for way, cache in lines:
                if time.time() - BEGUN > options.seconds:
                    print(f"| {model} | {way} | {cache} | not started: no time left |", flush=True)
                    continue
                rows.append(line(model, way, cache, Path(folder) / way, options))
                if options.out:
                    options.out.write_text(json.dumps(rows, indent=1))
    beyond(rows)


def line(model: str, way: str, cache: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """One process, and its row of the table."""
    row: dict[str, object] = {"model": model, "way": way, "cache": cache}
    command = [sys.executable, __file__, "--child", model, way, "--device", options.device]
    command += ["--rounds", str(options.rounds), *(["--tiny"] * options.tiny), *(["--profile"] * options.profile)]
    kept = {name: str(folder / part) for name, part in CACHES.items()}
    begun = time.time()
    try:
        limit = max(5.0, min(options.limit, options.seconds - (begun - BEGUN)))
        ran = subprocess.run(
            command, env={**os.environ, **kept}, capture_output=True, text=True, timeout=limit, check=False
        )
        told = [json.loads(text) for text in ran.stdout.splitlines() if text.startswith("{")]
        error = ran.stderr
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        told = [json.loads(text) for text in out.decode().splitlines() if text.startswith("{")]
        error = f"stopped after {limit:.0f} s"
    last = begun
    for entry in told:
        if "stage" in entry:
            row[entry["stage"]], last = entry["at"] - last, entry["at"]
        row |= entry.get("done", {})
    row["together"] = last - begun
    if "ms" not in row:
        row["failed"] = (error.strip().splitlines() or ["?"])[-1]
    if options.profile or "failed" in row:
        print(f"--- {model} {way} {cache}\n{error}", file=sys.stderr, flush=True)
    show(row)
    return row


def show(row: dict[str, object]) -> None:
    def cell(name: str) -> str:
        return f"{row[name]:.1f}" if name in row else "-"

    if "prepared" in row:  # what a step took to prepare, without its capture and its kernels
        row["compile"] = max(0.0, row["prepared"] - row["captures"] - row["kernels"])
        row["capture"] = row["captures"]
    columns = [cell(name) for name in (*STAGES, "kernels", "capture", "compile", "together", "ms")]
    note = f" failed: {row['failed']} |" if "failed" in row else ""
    print(f"| {row['model']} | {row['way']} | {row['cache']} | {' | '.join(columns)} |{note}", flush=True)


def beyond(rows: list[dict[str, object]]) -> None:
    """What the goals are about: seconds beyond the plain loop's own start."""
    loops = {row["model"]: row["together"] for row in rows if row["way"] == "loop"}
    for row in rows:
        if row["way"] != "loop" and "first round" in row and row["model"] in loops:
            more = row["together"] - loops[row["model"]]
            print(
                f"{row['model']}, {row['way']}, {row['cache']}: {row['together']:.1f} s, {more:+.1f} s beyond the loop"
            )


if __name__ == "__main__":
    main()
