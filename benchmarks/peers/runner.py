"""Runs engines in processes of their own, in turns, and makes a table of what they report.

A run's processes are known by a variable in their environment, which daemons and workers inherit; memory is what they
hold together, shared pages counted once (proportional set size).
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import uuid
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
_TICK = os.sysconf("SC_CLK_TCK")


def run(python: str, script: str, workload: str, threads: int, wait: float = 30, limit: float = 400) -> dict[str, Any]:
    """One run of one engine: its own report, with peak memory, wall time and what else the machine did."""
    tag = uuid.uuid4().hex
    source = str(HERE.parents[1] / "src")
    environment = dict(os.environ, BENCH_RUN=tag, BENCH_WORKLOAD=workload, BENCH_THREADS=str(threads))
    environment |= {"PYTHONPATH": source, "PYTHONWARNINGS": "ignore", "PFL_PYTORCH_DEVICE": "cpu"}
    command = [python, str(HERE / script)]
    _wait_for_quiet(wait)
    begun, busy = time.perf_counter(), _busy()
    log = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"bench-{tag}.log"
    with log.open("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=HERE)
        peak, used = _watch(process, tag, limit)
    text = log.read_text(errors="replace")
    log.unlink()
    wall = time.perf_counter() - begun
    found = [line for line in text.splitlines() if "RESULT {" in line]
    if not found:
        return {"error": text[-1500:]}
    report = json.loads(found[-1].split("RESULT ", 1)[1])
    return report | {"peak_mb": peak, "wall_s": wall, "others": (_busy() - busy - used) / wall}


def _watch(process: subprocess.Popen[bytes], tag: str, limit: float) -> tuple[float, float]:
    """Peak memory (MB) and processor seconds of a run, until it ends or its time is over."""
    peak, seconds, end = 0.0, {}, time.perf_counter() + limit
    while process.poll() is None:
        held = 0.0
        for pid in _family(tag):
            held += _memory(pid)
            seconds[pid] = max(seconds.get(pid, 0.0), _seconds(pid))
        peak = max(peak, held)
        if time.perf_counter() > end:
            process.kill()
        time.sleep(0.25)
    return peak, sum(seconds.values())


def _family(tag: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"BENCH_RUN={tag}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def _memory(pid: str) -> float:
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _seconds(pid: str) -> float:
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def _wait_for_quiet(limit: float) -> None:
    """Up to `limit` seconds, for a second in which the rest of the machine is idle."""
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        before = _busy()
        time.sleep(1)
        if _busy() - before < 0.2:
            return


def _busy() -> float:
    fields = [int(v) for v in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICK


Engine = tuple[str, str, int]  # interpreter, script, threads


def measure(
    engines: dict[str, Engine], workload: str, repeats: int, wait: float = 30
) -> dict[str, list[dict[str, Any]]]:
    """Every engine `repeats` times, in turns, so that a slow minute of the machine hits all of them."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn in range(repeats):
        for name, (python, script, threads) in engines.items():
            report = run(python, script, workload, threads, wait)
            results[name].append(report)
            if "error" in report:
                print(f"{workload} {name} failed: {report['error'][-600:]}", file=sys.stderr)
            else:
                median = statistics.median(report["round_s"][1:])
                text = f"{workload} [{turn}] {name:12} {median:.4f} s a round, others used {report['others']:.2f} cores"
                print(text, file=sys.stderr, flush=True)
    return results


def table(results: dict[str, list[dict[str, Any]]], workload: str, ours: str) -> str:
    """Markdown: medians over runs of the median round (the first left out), with the spread of the runs.

    Runs beside which others used more than a third of a core count only where an engine has no better ones.
    """
    good = {name: [r for r in runs if "error" not in r] for name, runs in results.items()}
    good = {name: [r for r in runs if r["others"] < 0.33] or runs for name, runs in good.items()}
    medians = {name: [statistics.median(r["round_s"][1:]) for r in runs] for name, runs in good.items() if runs}
    base = statistics.median(medians[ours])
    columns = ["s a round (range, runs)", "times ours", "start-up, s", "peak memory, MB", "accuracy", "others, cores"]
    rows = ["| " + " | ".join([workload, *columns]) + " |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, values in medians.items():
        middle, runs = statistics.median(values), good[name]
        ready, peak, right, others = (
            statistics.median(r[key] for r in runs) for key in ("ready_s", "peak_mb", "accuracy", "others")
        )
        spread = f"{middle:.4f} ({min(values):.4f} to {max(values):.4f}, {len(values)})"
        rows.append(
            f"| {name} | {spread} | {middle / base:.1f} | {ready:.1f} | {peak:.0f} | {right:.3f} | {others:.2f} |"
        )
    return "\n".join(rows)
