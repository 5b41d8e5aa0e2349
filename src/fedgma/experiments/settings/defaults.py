"""Settings filled in: what a user leaves open takes the paper's choice for the data set and the algorithm."""

from fedgma.errors import ConfigError
from fedgma.experiments.settings import attack, clock, local_training, partition, shift
from fedgma.experiments.settings.partition import OWN
from fedgma.experiments.settings.run import Settings, is_path
from fedgma.simulation.algorithms import ALGORITHMS

# data set -> model, local epochs, classes per client (Table 1 of the paper); others get the values for small images
PAPER: dict[str, tuple[str, int, int]] = {
    "cifar10": ("resnet18-gn", 3, 2),
    "cifar100": ("resnet18-gn", 3, 10),
    "tinyimagenet": ("resnet18-gn", 12, 20),
    "femnist": ("lenet", 5, 2),
    "femnist-62": ("lenet", 5, 2),
    "femnist-by-sample": ("lenet", 5, 2),
}


def complete(settings: Settings, *, own: bool = False) -> Settings:
    """Fill in settings that are None with the paper's choice for the data set and the algorithm.

    For a user's data (`own`, or a path) model, partition and number of clients stay open, since they depend on the
    data; `Materials.adopt` fills them in.

    >>> full = complete(Settings(algorithm="fedyogi"))
    >>> full.model, full.partition.clients, full.clients_per_round, full.server_learning_rate
    ('lenet', 100, 10, 0.01)
    """
    model, epochs, classes = PAPER.get(settings.dataset, ("lenet", 1, 2))
    own = own or is_path(settings.dataset) or settings.dataset.startswith(OWN)
    part = partition.completed(settings.partition, seed=settings.seed, classes=classes, own=own)
    clients, usual = part.clients, None if own else 10
    algorithm = ALGORITHMS[settings.algorithm]
    values = {name: value for name, value in algorithm.settings.items() if getattr(settings, name) is None}
    filled = settings.model_copy(
        update={
            **values,
            "partition": part,
            "shift": shift.completed(settings.shift, settings.dataset),
            "attack": attack.completed(settings.attack),
            "clock": clock.completed(settings.clock),
            "round_schedule": local_training.completed(settings.round_schedule, settings.rounds),
            "model": settings.model or (None if own else model),
            "local_epochs": settings.local_epochs or epochs,
            "clients_per_round": settings.clients_per_round or (usual if clients is None else min(10, clients)),
            "server_learning_rate": settings.server_learning_rate or algorithm.learning_rate,
        }
    )
    algorithm.read(filled)  # checks its settings
    local_training.check_local(filled)
    if clients is not None and filled.clients_per_round is not None and filled.clients_per_round > clients:
        raise ConfigError(
            f"clients_per_round: expected at most partition.clients = {clients}, got {filled.clients_per_round}"
        )
    return filled
