"""Variants of the engine side by side: all compile at the same time, then each is timed alone."""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
CHILDREN = ["W1", "W1-library", "W1-library-alone", "W1-combo", "W1-tf32", "W1-bf16", "pfl-bf16", "pfl-tf32", "W1x64"]


def child(word):
    import torch
    from workloads import WORKLOADS, fleet_specs, make_images, spec_of

    from fedgma.simulation.fleet import assemble, play_round, start

    name, *rest = word.split("-")
    name, _, runs = name.partition("x")
    options = {"trainer": "engine", "compile_after": 0}
    for one in rest:
        if one in ("bf16", "tf32", "fp32"):
            options["precision"] = one
        elif one == "alone":
            from fedgma.training.fast import convolutions

            convolutions.SMALL = 0
        elif one == "combo":
            import torch._inductor.config as config

            config.combo_kernels = True
        elif one == "library":
            from fedgma.training.fast import gpu

            gpu.KERNELS = ("conv_matrix", "conv_thread")
    work = WORKLOADS[name]
    images = make_images(work, "cuda")
    specs = fleet_specs(work, images, int(runs)) if runs else [spec_of(work, images)]
    begun = time.perf_counter()
    fleet = assemble(specs, **options)
    state, played = play_round(fleet, start(fleet))
    print(played.records[0].train_loss, file=sys.stderr)
    first = time.perf_counter() - begun
    for _ in range(4):
        state, played = play_round(fleet, state)
    torch.cuda.synchronize()
    weight = state.params.double().sum().item(), state.params.view(torch.int32).sum(dtype=torch.int64).item()
    print("ready", flush=True)
    sys.stdin.readline()
    rounds = 10 if runs else 100
    for _ in range(3):
        state, played = play_round(fleet, state)
    times, host = [], []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(rounds):
            state, played = play_round(fleet, state)
            played.sent()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / rounds * 1e3)
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(1 if runs else 5):
            state, played = play_round(fleet, state)
            played.sent()
        host.append((time.perf_counter() - begun) / (1 if runs else 5) * 1e3)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            state, played = play_round(fleet, state)
        torch.cuda.synchronize()
    table = [row for row in seen.key_averages() if row.self_device_time_total > 0]
    device = sum(row.self_device_time_total for row in table) / 2e3
    found = {"variant": word, "first s": round(first, 1), "ms": [round(t, 3) for t in times]}
    found |= {"host ms": round(statistics.median(host), 3), "device ms": round(device, 3), "sum": weight}
    print(json.dumps(found), flush=True)
    for row in sorted(table, key=lambda row: -row.self_device_time_total)[:22]:
        print(f"  {row.self_device_time_total / 2:9.1f} us  {row.count / 2:6.1f} x  {row.key[:90]}")
    print("done", flush=True)


class Running:
    def __init__(self, word):
        self.word, self.ready, self.done, self.lines = word, threading.Event(), threading.Event(), []
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        command = [sys.executable, __file__, "--child", word]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self.errors = []
        threading.Thread(target=self.read, daemon=True).start()
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.strip() == "ready":
                self.ready.set()
            elif line.strip() == "done":
                self.done.set()
            else:
                self.lines.append(line.rstrip())
        self.ready.set()
        self.done.set()


def main():
    words = sys.argv[1:] or CHILDREN
    begun = time.time()
    running = [Running(word) for word in words]
    for one in running:
        one.ready.wait(max(1, 75 - (time.time() - begun)))
    print(f"all ready after {time.time() - begun:.0f} s", flush=True)
    for one in running:
        if not one.ready.is_set():
            print(f"{one.word}: not ready in time", flush=True)
            one.process.kill()
            continue
        try:
            one.process.stdin.write("go\n")
            one.process.stdin.flush()
        except OSError:
            pass
        one.done.wait(15)
        print("\n".join(one.lines), flush=True)
        if not one.lines:
            print(f"{one.word} failed:\n{''.join(one.errors[-12:])}", flush=True)
        warned = [line.strip()[:200] for line in one.errors if "could not be" in line]
        print("\n".join(warned), flush=True)
        one.process.kill()
    print(f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
