"""Data sets by name: `load("fmnist-mini")` and no download; see `docs/data.md` for the others."""

from fedgma.datasets.embedded import load_mini
from fedgma.datasets.sets import Dataset, Source, Split
from fedgma.errors import ConfigError

__all__ = ["Dataset", "Source", "Split", "load"]

LOADERS = {"fmnist-mini": load_mini}


def load(name: str) -> Dataset:
    """The data set of that name.

    >>> load("fmnist-mini").classes[:2]
    ('T-shirt/top', 'Trouser')
    """
    if name not in LOADERS:
        raise ConfigError(f"unknown data set {name!r}; known: {', '.join(sorted(LOADERS))}")
    return LOADERS[name]()
