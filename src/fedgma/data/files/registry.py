"""The data sets that are known by name: their expected contents, file formats, folders and download addresses."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedgma.data.files import idx, parquet
from fedgma.data.files import npz as packed
from fedgma.data.files.cifar import find_cifar10, find_cifar100
from fedgma.data.files.embedded import FASHION
from fedgma.data.files.leaf import CHARACTERS, find_leaf
from fedgma.data.files.reader import Finder
from fedgma.data.files.tinyimagenet import find_tinyimagenet

Counts = tuple[int, ...]


class FileFormat(NamedTuple):
    """A function that finds a data set in a folder, and the class histograms that the set must then have."""

    find: Finder
    train: Counts | None = None
    test: Counts | None = None


class Remote(NamedTuple):
    """A file that can be downloaded: its checksum, and the addresses to try in turn."""

    file: str
    checksum: str  # "md5:..." as published by the data set's authors
    urls: tuple[str, ...]


class Spec(NamedTuple):
    """A known data set."""

    about: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # channel, height, width
    formats: tuple[FileFormat, ...]
    looked_for: str  # description of the files, for error messages
    system: tuple[Path, ...] = ()  # folders of operating-system packages
    remote: tuple[Remote, ...] = ()


DIGITS = tuple("0123456789")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


def _idx_remote(checksums: Mapping[str, str], *bases: str) -> tuple[Remote, ...]:
    return tuple(Remote(file, f"md5:{md5}", tuple(base + file for base in bases)) for file, md5 in checksums.items())


MNIST_FILES = _idx_remote(
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FMNIST_FILES = _idx_remote(
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
CIFAR10_FILE = Remote(
    "cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
CIFAR100_FILE = Remote(
    "cifar-100-binary.tar.gz",
    "md5:03b5dce01913d631647c71ecec9e9cb8",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
)
TINYIMAGENET_FILE = Remote(
    "tiny-imagenet-200.zip",
    "md5:90528d7ca1a48142e341f4ef8d21d0de",
    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
)

SPECS: dict[str, Spec] = {
    "mnist": Spec(
        "handwritten digits, 60,000 + 10,000",
        DIGITS,
        (1, 28, 28),
        (
            FileFormat(packed.finder("mnist.npz", "mnist"), MNIST_TRAIN, MNIST_TEST),
            FileFormat(idx.finder(MNIST_TEST, "mnist", "MNIST"), MNIST_TRAIN, MNIST_TEST),
            FileFormat(parquet.finder("L", 28, "mnist"), MNIST_TRAIN, MNIST_TEST),
        ),
        "mnist.npz, the four idx files, or mnist/*.parquet",
        remote=MNIST_FILES,
    ),
    "mnist-writers": Spec(
        "MNIST with the writer of every digit: 539 training and 297 other test writers",
        DIGITS,
        (1, 28, 28),
        (FileFormat(packed.finder("mnist.npz", "mnist-writers"), MNIST_TRAIN, MNIST_TEST),),
        "mnist.npz with the writers' ids",
    ),
    "fmnist": Spec(
        "Fashion-MNIST, 60,000 + 10,000",
        FASHION,
        (1, 28, 28),
        (
            FileFormat(idx.finder((1000,) * 10, "fmnist", "fashion-mnist", "FashionMNIST"), (6000,) * 10, (1000,) * 10),
            FileFormat(parquet.finder("L", 28, "fmnist", "fashion_mnist"), (6000,) * 10, (1000,) * 10),
        ),
        "the four idx files in fmnist/, or fashion_mnist/*.parquet",
        system=(Path("/usr/share/datasets/fashion-mnist"),),
        remote=FMNIST_FILES,
    ),
    "cifar10": Spec(
        "CIFAR-10, 50,000 + 10,000 colour images",
        CIFAR,
        (3, 32, 32),
        (
            FileFormat(packed.finder("cifar10.npz", "cifar10"), (5000,) * 10, (1000,) * 10),
            FileFormat(find_cifar10, (5000,) * 10, (1000,) * 10),
            FileFormat(parquet.finder("RGB", 32, "cifar10"), (5000,) * 10, (1000,) * 10),
        ),
        "cifar10.npz, cifar-10-binary.tar.gz, or cifar10/*.parquet",
        remote=(CIFAR10_FILE,),
    ),
    "cifar100": Spec(
        "CIFAR-100, 50,000 + 10,000 colour images",
        tuple(map(str, range(100))),
        (3, 32, 32),
        (
            FileFormat(find_cifar100, (500,) * 100, (100,) * 100),
            FileFormat(parquet.finder("RGB", 32, "cifar100"), (500,) * 100, (100,) * 100),
        ),
        "cifar-100-binary.tar.gz, or cifar100/*.parquet",
        remote=(CIFAR100_FILE,),
    ),
    "tinyimagenet": Spec(
        "TinyImageNet, 100,000 + 10,000 (its labelled validation part)",
        tuple(map(str, range(200))),
        (3, 64, 64),
        (
            FileFormat(find_tinyimagenet, (500,) * 200, (50,) * 200),
            FileFormat(parquet.finder("RGB", 64, "tinyimagenet", "tiny-imagenet"), (500,) * 200, (50,) * 200),
            FileFormat(packed.finder("tinyimagenet_subset.npz", "tinyimagenet"), (40,) * 200, (20,) * 200),
        ),
        "tiny-imagenet-200.zip or its folder, tinyimagenet/*.parquet, or tinyimagenet_subset.npz",
        remote=(TINYIMAGENET_FILE,),
    ),
    "femnist-by-sample": Spec(
        "FEMNIST, 62 classes by writer, as LEAF splits it: within each writer",
        CHARACTERS,
        (1, 28, 28),
        (
            FileFormat(find_leaf),
            FileFormat(parquet.finder("L", 28, "femnist")),
            FileFormat(packed.finder("femnist.npz", "femnist-62")),
        ),
        "LEAF's femnist/train/*.json and femnist/test/*.json, femnist/*.parquet, or femnist.npz",
    ),
}
