"""Client-side algorithms written out from their papers' boxes: one client after the other, numpy, float64.

The model is softmax regression without a bias. Each function plays the rounds of a run whose clients all have the same
number of samples, so that the papers' plain means are the library's weighted ones. `play` gives each of them the
clients of a round, a client's gradients of the round in order, and the server's way to apply a step under a mask.
"""

import numpy as np

from fedgma.simulation.sampling import sample_clients
from fedgma.training.batches import batch_order


def gradients(spec, round, client):
    """The gradient functions of a client's batches in a round, in order."""
    pool, samples = spec.federation.train, spec.federation.clients[client]
    index, counts = batch_order(
        samples, seed=spec.seed, round=round, client=client, epochs=spec.local_epochs, batch=spec.batch_size
    )
    for batch, count in zip(index, counts, strict=True):
        x = pool.x[batch[:count]].double().numpy() + 0.01 * (client % 7)  # the client's own shift
        wanted = np.eye(pool.classes)[pool.y[batch[:count]].numpy()]

        def gradient(w, x=x, wanted=wanted):
            scores = np.exp(x @ w.T)
            return (scores / scores.sum(1, keepdims=True) - wanted).T @ x / len(x)

        yield gradient


def masked(step, updates, tau):
    """A server's step times the mask of the votes on what clients sent."""
    votes = abs(np.sign(updates).sum(0))
    return step * np.where(votes >= tau * len(updates), 1.0, votes / len(updates))


def play(name, spec, w, tau=0.0, **settings):
    """The model after the rounds of the run."""
    clients = len(spec.federation.clients)
    memory = {"clients": [np.zeros_like(w) for _ in range(clients)], "server": np.zeros_like(w)}
    memory |= {"mu": [np.zeros_like(w) for _ in range(clients)], "s": np.zeros_like(w), "N": clients}
    for round in range(1, spec.rounds + 1):
        sampled = sample_clients(spec, round).tolist()
        batches = {client: list(gradients(spec, round, client)) for client in sampled}
        w = ROUNDS[name](w, batches, memory, spec.client_learning_rate, tau, **settings)
    return w


def feddyn(x, batches, memory, eta, tau, alpha):
    deltas = []
    for k, steps in batches.items():
        theta = x.copy()
        for gradient in steps:
            theta = theta - eta * (gradient(theta) - memory["clients"][k] + alpha * (theta - x))
        memory["clients"][k] = memory["clients"][k] - alpha * (theta - x)
        deltas.append(theta - x)
    memory["server"] = memory["server"] - alpha / memory["N"] * sum(deltas)
    return x + masked(np.mean(deltas, 0) - memory["server"] / alpha, deltas, tau)


def fedcm(x, batches, memory, eta, tau, alpha):
    deltas = []
    for steps in batches.values():
        theta = x.copy()
        for gradient in steps:
            theta = theta - eta * (alpha * gradient(theta) + (1 - alpha) * memory["server"])
        deltas.append(theta - x)
    length = eta * len(steps)
    memory["server"] = -np.mean(deltas, 0) / length
    return x - length * masked(memory["server"], deltas, tau)  # the server's rate is 1 in units of the update


def fedacg(x, batches, memory, eta, tau, lambda_, beta):
    sent, deltas = x + lambda_ * memory["server"], []
    for steps in batches.values():
        theta = sent.copy()
        for gradient in steps:
            theta = theta - eta * (gradient(theta) + beta * (theta - sent))
        deltas.append(theta - sent)
    memory["server"] = lambda_ * memory["server"] + np.mean(deltas, 0)
    return x + masked(memory["server"], deltas, tau)


def fedsam(x, batches, memory, eta, tau, rho):
    deltas = []
    for steps in batches.values():
        theta = x.copy()
        for gradient in steps:
            g = gradient(theta)
            theta = theta - eta * gradient(theta + rho * g / np.linalg.norm(g))
        deltas.append(theta - x)
    return x + masked(np.mean(deltas, 0), deltas, tau)


def mofedsam(x, batches, memory, eta, tau, rho, beta):
    deltas = []
    for steps in batches.values():
        theta = x.copy()
        for gradient in steps:
            g = gradient(theta)
            g = gradient(theta + rho * g / np.linalg.norm(g))
            theta = theta - eta * (beta * g + (1 - beta) * memory["server"])
        deltas.append(theta - x)
    length = eta * len(steps)
    memory["server"] = -np.mean(deltas, 0) / length
    return x - length * masked(memory["server"], deltas, tau)


def fedspeed(x, batches, memory, eta, tau, lambda_, rho, alpha):
    sent = []
    for i, steps in batches.items():
        theta = x.copy()
        for gradient in steps:
            first = gradient(theta)
            second = gradient(theta + rho * first)
            quasi = (1 - alpha) * first + alpha * second
            theta = theta - eta * (quasi - memory["clients"][i] + (theta - x) / lambda_)
        memory["clients"][i] = memory["clients"][i] - (theta - x) / lambda_
        sent.append(theta - lambda_ * memory["clients"][i])
    return x + masked(np.mean(sent, 0) - x, sent - x, tau)


def fedsmoo(x, batches, memory, eta, tau, beta, rho):
    deltas, tilts = [], []
    for i, steps in batches.items():
        theta, mu, s = x.copy(), memory["mu"][i], memory["s"]
        for gradient in steps:
            toward = gradient(theta) - mu - s
            here = rho * toward / np.linalg.norm(toward)
            mu = mu + here - s
            theta = theta - eta * (gradient(theta + here) - memory["clients"][i] + (theta - x) / beta)
        memory["mu"][i] = mu
        memory["clients"][i] = memory["clients"][i] - (theta - x) / beta
        deltas.append(theta - x)
        tilts.append(mu - here)
    memory["s"] = rho * np.mean(tilts, 0) / np.linalg.norm(np.mean(tilts, 0))
    memory["server"] = memory["server"] - sum(deltas) / (beta * memory["N"])
    return x + masked(np.mean(deltas, 0) - beta * memory["server"], deltas, tau)


def scaffold(x, batches, memory, eta, tau):
    deltas, changes = [], []
    for i, steps in batches.items():
        theta, c, c_i = x.copy(), memory["server"], memory["clients"][i]
        for gradient in steps:
            theta = theta - eta * (gradient(theta) - c_i + c)
        memory["clients"][i] = c_i - c + (x - theta) / (len(steps) * eta)
        changes.append(memory["clients"][i] - c_i)
        deltas.append(theta - x)
    memory["server"] = memory["server"] + sum(changes) / memory["N"]
    return x + masked(np.mean(deltas, 0), deltas, tau)


def fedprox(x, batches, memory, eta, tau, mu):
    deltas = []
    for steps in batches.values():
        theta = x.copy()
        for gradient in steps:
            theta = theta - eta * (gradient(theta) + mu * (theta - x))
        deltas.append(theta - x)
    return x + masked(np.mean(deltas, 0), deltas, tau)


ROUNDS = {
    "fedprox": fedprox,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fedcm": fedcm,
    "fedacg": fedacg,
    "fedsam": fedsam,
    "mofedsam": mofedsam,
    "fedspeed": fedspeed,
    "fedsmoo": fedsmoo,
}
