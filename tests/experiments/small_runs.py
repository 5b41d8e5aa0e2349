"""Settings of runs that play in a second."""

SMALL = {
    "model": "logistic",
    "rounds": 6,
    "partition": {"clients": 20},
    "clients_per_round": 4,
    "evaluate_every": 2,
    "mask_every": 2,
    "client_test_size": 50,
    "client_learning_rate": 0.01,
}
