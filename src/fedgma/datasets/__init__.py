"""Data sets by name: `load("fmnist-mini")` and no download; see `docs/data.md` for the others and for your own."""

from fedgma.datasets.own import from_arrays, load_images, load_npz
from fedgma.datasets.sets import Dataset, Source, Split
from fedgma.datasets.sources import load, names
from fedgma.datasets.writers import hold_out_writers

__all__ = [
    "Dataset",
    "Source",
    "Split",
    "from_arrays",
    "hold_out_writers",
    "load",
    "load_images",
    "load_npz",
    "names",
]
