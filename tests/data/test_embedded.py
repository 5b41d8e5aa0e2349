import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

from fedgma.data.files import load
from fedgma.data.files.dataset import histogram
from fedgma.errors import ConfigError


def test_the_embedded_set_is_stratified():
    mini = load("fmnist-mini")
    assert histogram(mini.train, 10) == (1000,) * 10
    assert histogram(mini.test, 10) == (200,) * 10


def test_the_embedded_images_are_complete():
    mini = load("fmnist-mini")
    assert mini.train.x.shape == (10000, 1, 28, 28)
    assert mini.train.x.dtype == np.uint8
    assert 0.27 < mini.train.x.mean() / 255 < 0.30  # the whole of Fashion-MNIST has mean 0.286


def test_no_embedded_image_is_in_both_train_and_test():
    mini = load("fmnist-mini")
    train = {image.tobytes() for image in mini.train.x}
    assert not any(image.tobytes() in train for image in mini.test.x)


def test_the_embedded_file_is_small_and_carries_its_licence():
    folder = files("fedgma.data.files")
    assert len((folder / "fmnist_mini.npz").read_bytes()) <= 6 * 2**20
    assert "Zalando SE" in (folder / "fmnist_mini.LICENSE.txt").read_text()


def test_the_embedded_set_needs_numpy_only():
    code = (
        "import sys, fedgma.data.files as d; d.load('fmnist-mini');"
        "heavy = {'torch', 'PIL', 'pooch', 'pyarrow', 'scipy', 'matplotlib', 'typer'} & set(sys.modules);"
        "sys.exit(','.join(sorted(heavy)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr.strip() == ""
    )


def test_an_unknown_data_set_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown data set 'fminst'.*fmnist-mini"):
        load("fminst")
