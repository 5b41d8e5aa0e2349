"""Make src/fedgma/data/files/fmnist_mini.npz: a stratified, seeded draw of Fashion-MNIST.

    python tools/make_fmnist_mini.py FOLDER_WITH_THE_FOUR_IDX_GZ_FILES OUTPUT.npz

Writes 1,000 training and 200 test images of each class, in the order of the original files. The result is the same to
the byte wherever it is made with the same zlib.
"""

import gzip
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

from fedgma.seeds import generator

PARTS = {"train": ("train", 1000), "test": ("t10k", 200)}


def read(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one original split."""
    pixels = gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


def stratified(labels: np.ndarray, per_class: int, part: str) -> np.ndarray:
    """Positions of `per_class` samples of each class, ascending."""
    rng = generator(0, "fmnist-mini", part)
    chosen = [rng.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in range(10)]
    return np.sort(np.concatenate(chosen))


def main(folder: Path, output: Path) -> None:
    """Draw, and write a compressed .npz with a fixed date so that the bytes repeat."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for part, (stem, per_class) in PARTS.items():
            x, y = read(folder, stem)
            index = stratified(y, per_class, part)
            for key, array in ((f"{part}_x", x[index]), (f"{part}_y", y[index])):
                buffer = io.BytesIO()
                np.save(buffer, array, allow_pickle=False)
                entry = zipfile.ZipInfo(f"{key}.npy", (2020, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, buffer.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
