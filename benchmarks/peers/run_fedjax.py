"""FedJAX: its federated averaging, jit backend. It fills up the last batch of a client by starting over."""

from importlib.metadata import version

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import workload

if not hasattr(jax, "tree_map"):  # the name that newer JAX dropped and FedJAX still calls
    jax.tree_map = jax.tree_util.tree_map
import fedjax

settings = workload.Settings()
x, y, xt, yt = workload.data()
x, xt = (np.moveaxis(workload.scaled(v), 1, -1) for v in (x, xt))
y, yt = y.astype(np.int32), yt.astype(np.int32)


def logits(batch: dict[str, jax.Array]) -> jax.Array:
    def stage(h: jax.Array, outputs: int, padding: str) -> jax.Array:
        h = jax.nn.relu(hk.Conv2D(outputs, 5, padding=padding)(h))
        return hk.max_pool(h, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    h = stage(stage(batch["x"], 6, "SAME"), 16, "VALID").reshape(-1, 400)
    for width in (120, 84):
        h = jax.nn.relu(hk.Linear(width)(h))
    return hk.Linear(10)(h)


def loss(batch: dict[str, jax.Array], scores: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], axis=1)[:, 0]


example = {"x": jnp.zeros((1, 28, 28, 1)), "y": jnp.zeros(1, jnp.int32)}
metrics = {"accuracy": fedjax.metrics.Accuracy()}
model = fedjax.create_model_from_haiku(hk.transform(logits), example, loss, metrics)
parts = [slice(k * settings.samples, (k + 1) * settings.samples) for k in range(settings.clients)]
clients = fedjax.InMemoryFederatedData({k: {"x": x[part], "y": y[part]} for k, part in enumerate(parts)})
fedjax.set_for_each_client_backend("jit")
average = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(workload.LR, momentum=workload.MOMENTUM),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=workload.BATCH, num_epochs=1),
)
sampler = fedjax.client_samplers.UniformGetClientSampler(clients, settings.clients_per_round, 1)
state = average.init(model.init(jax.random.PRNGKey(1)))
clock = workload.Clock(settings)
for n in range(settings.rounds):
    sampler.set_round_num(n)
    clock.begin()
    state, _ = average.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    clock.end()
test = fedjax.ClientDataset({"x": xt, "y": yt}).padded_batch(batch_size=1000)
right = fedjax.evaluate_model(model, state.params, test)["accuracy"]
clock.report(right, fedjax=version("fedjax"), jax=jax.__version__)
