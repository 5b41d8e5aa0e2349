"""The data set inside the package: a stratified part of Fashion-MNIST, usable without a download."""

import hashlib
import io
from importlib.resources import files

import numpy as np

from fedgma.data.files.dataset import Dataset, Source, Split

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load_mini() -> Dataset:
    """Fashion-MNIST mini: 10,000 training and 2,000 test images, 1,000 and 200 of each class.

    >>> load_mini().train.x.shape
    (10000, 1, 28, 28)
    """
    content = (files("fedgma.data.files") / "fmnist_mini.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        train = Split(arrays["train_x"][:, None], arrays["train_y"].astype(np.int64))
        test = Split(arrays["test_x"][:, None], arrays["test_y"].astype(np.int64))
    source = Source("embedded", "fmnist_mini.npz", hashlib.sha256(content).hexdigest())
    return Dataset("fmnist-mini", train, test, FASHION, source)
