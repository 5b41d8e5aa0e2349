"""Data sets by name: `load("fmnist-mini")` and no download; see `docs/data.md` for the others and for your own."""

from fedgma.data.files.dataset import Dataset, Source, Split
from fedgma.data.files.locate import load, names
from fedgma.data.files.own.arrays import from_arrays, load_npz
from fedgma.data.files.own.folders import load_folder, load_images, load_own
from fedgma.data.files.own.objects import from_data
from fedgma.data.files.writers import hold_out_writers

__all__ = [
    "Dataset",
    "Source",
    "Split",
    "from_arrays",
    "from_data",
    "hold_out_writers",
    "load",
    "load_folder",
    "load_images",
    "load_npz",
    "load_own",
    "names",
]
