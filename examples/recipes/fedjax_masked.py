"""Masked averaging in FedJAX: an aggregator, and federated averaging that uses it. Running it checks it.

python examples/recipes/fedjax_masked.py
"""

import jax
import jax.numpy as jnp
import numpy as np

if not hasattr(jax, "tree_map"):  # the name that newer JAX dropped and FedJAX still calls
    jax.tree_map = jax.tree_util.tree_map
import fedjax
from fedjax.algorithms.fed_avg import ServerState, create_train_for_each_client

import fedgma


# recipe
def masked_aggregator(tau=0.4):
    def apply(clients_params_and_weights, state):
        tally = fedgma.Tally()
        for client, delta, weight in clients_params_and_weights:
            leaves, tree = jax.tree_util.tree_flatten(delta)
            tally.add({str(k): np.asarray(leaf) for k, leaf in enumerate(leaves)}, weight, client=client)
        update = fedgma.finish(tally, tau).update
        return jax.tree_util.tree_unflatten(tree, [jnp.asarray(update[str(k)]) for k in range(len(leaves))]), state

    return fedjax.aggregators.Aggregator(lambda: None, apply)


def masked_averaging(grad_fn, client_optimizer, server_optimizer, hparams, aggregator):
    train = create_train_for_each_client(grad_fn, client_optimizer)

    def apply(server, clients):
        counts = {client: len(data) for client, data, _ in clients}
        batches = [(client, data.shuffle_repeat_batch(hparams), rng) for client, data, rng in clients]
        deltas = ((client, delta, counts[client]) for client, delta in train(server.params, batches))
        mean, _ = aggregator.apply(deltas, None)
        opt_state, params = server_optimizer.apply(mean, server.opt_state, server.params)
        return ServerState(params, opt_state), {}

    return fedjax.FederatedAlgorithm(lambda params: ServerState(params, server_optimizer.init(params)), apply)


# end of the recipe


def main() -> None:
    """Two rounds of FedJAX, each compared with `fedgma.masked_mean` over the updates that its clients made."""
    rng = np.random.default_rng(0)
    sizes = [5, 9, 14, 30]
    people = {f"p{k}": {"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for k, n in enumerate(sizes)}
    data = fedjax.InMemoryFederatedData({k: {n: v.astype(np.float32) for n, v in d.items()} for k, d in people.items()})

    def loss(params, batch, key):
        return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

    seen = []

    def watched(inner):
        def apply(deltas, state):
            deltas = [(client, jax.tree_util.tree_map(np.asarray, delta), weight) for client, delta, weight in deltas]
            mean, state = inner.apply(iter(deltas), state)
            seen.append((deltas, mean))
            return mean, state

        return fedjax.aggregators.Aggregator(inner.init, apply)

    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=4, num_epochs=1)
    algorithm = masked_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(0.1), fedjax.optimizers.sgd(1.0), hparams, watched(masked_aggregator(0.6))
    )
    state = algorithm.init({"w": jnp.zeros(3), "b": jnp.zeros(())})
    for number in range(2):
        keys = jax.random.split(jax.random.PRNGKey(number), len(sizes))
        clients = [(client, one, key) for (client, one), key in zip(data.clients(), keys, strict=True)]
        before = state.params
        state, _ = algorithm.apply(state, clients)
        deltas, _ = seen[-1]
        expected = fedgma.masked_mean(0.6)([delta for _, delta, _ in deltas], [weight for *_, weight in deltas]).update
        for name, step in expected.items():
            np.testing.assert_allclose(state.params[name], before[name] - step, rtol=1e-6, atol=1e-7)
    print(f"FedJAX: {len(seen)} rounds of {len(sizes)} clients, equal to fedgma.masked_mean")


if __name__ == "__main__":
    main()
