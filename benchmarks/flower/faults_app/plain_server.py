"""Flower's own FedAvg or FedAdam over the same clients; notes after every round what the global model is like."""

import json
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from fmnist_gma import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    words = task.words_of(config)
    spec = task.spec_of(words)
    nodes = len(spec.federation.clients)
    options = {"fraction_evaluate": 0.0, "min_train_nodes": nodes, "min_available_nodes": nodes}
    strategy = FedAdam(eta=0.01, **options) if config["strategy"] == "fedadam" else FedAvg(**options)
    folder = Path(str(config["state"]))
    folder.mkdir(parents=True, exist_ok=True)

    def owners(values: dict[str, np.ndarray]) -> list[int]:
        """The clients whose own model is the global one after the first round."""
        local = [task.train(words, task.initial_model(words), round=1, client=client).model for client in range(nodes)]
        return [c for c, model in enumerate(local) if all(np.allclose(model[n], values[n], atol=1e-6) for n in values)]

    def note(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        values = {name: array.numpy() for name, array in arrays.items()}
        whole = np.concatenate([value.ravel().astype(np.float64) for value in values.values()])
        last = list(values.values())[-1].ravel()
        line = {"round": round, "finite": bool(np.isfinite(whole).all()), "largest": float(np.abs(whole).max())}
        line |= {"last": last.tolist(), "type": str(last.dtype), "owners": owners(values) if round == 1 else []}
        with (folder / "notes.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return None

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.initial_model(words)),
        num_rounds=spec.rounds,
        timeout=float(config["timeout"]),
        evaluate_fn=note,
    )
    (folder / "ended").touch()
