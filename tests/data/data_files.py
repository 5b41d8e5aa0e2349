"""Small files in the original formats."""

import gzip
import struct

import numpy as np


def write_idx(path, array):
    """An idx file of bytes, gzipped where the name says so."""
    content = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_idx_set(folder, y_train, y_test, end=".gz"):
    """The four files of a small MNIST whose images are filled with their label."""
    for stem, y in (("train", y_train), ("t10k", y_test)):
        y = np.asarray(y, np.uint8)
        x = np.broadcast_to(y[:, None, None], (len(y), 28, 28)).astype(np.uint8)
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", x)
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", y)
