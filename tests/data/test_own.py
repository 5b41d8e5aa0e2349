import numpy as np
import pytest
from PIL import Image

from fedgma.data.files import from_arrays, load, load_images, load_npz
from fedgma.errors import ConfigError, DataError


@pytest.mark.parametrize("shape", [(20, 6, 5), (20, 1, 6, 5), (20, 6, 5, 1)])
def test_grey_images_may_come_in_any_usual_layout(shape):
    assert from_arrays(np.zeros(shape, np.uint8), np.arange(20) % 2).train.x.shape == (16, 1, 6, 5)


def test_the_test_part_is_stratified_and_shares_nothing_with_the_training_part():
    x = np.arange(100, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    data = from_arrays(x, np.arange(100) % 4, client=np.arange(100) // 10)
    train, test = set(data.train.x[:, 0, 0, 0].tolist()), set(data.test.x[:, 0, 0, 0].tolist())
    assert np.bincount(data.test.y).tolist() == [5] * 4
    assert train | test == set(range(100))
    assert not train & test
    assert (data.train.client == data.train.x[:, 0, 0, 0] // 10).all()


def test_float_features_stay_unchanged():
    data = from_arrays(np.full((4, 3), 0.5), [0, 1, 0, 1], test=(np.zeros((1, 3)), [1]))
    assert data.train.x.dtype == np.float32
    assert data.test.x.shape == (1, 3)


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((3, 2, 2), np.int32), [0, 1, 0], "must be uint8 images or float features, got int32"),
        (np.zeros((3, 2, 2), np.uint8), [0, 1], "one label for each of 3 samples, got 2 labels"),
        (np.zeros((3, 2, 2), np.uint8), [0.0, 1.0, 1.0], "integers or texts, got float64; .* set task=regression"),
        (
            np.array([[0.0], [0.0], [np.nan]]),
            [0, 1, 1],
            "must be finite, .* in 1 of 3 samples, first in sample 2",
        ),
        (np.zeros((3, 2)), [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], "integers or texts, got float64"),
        (np.zeros((3, 2), np.uint8), [0, 1, 1], r"\[sample, channel, height, width\]"),
    ],
)
def test_invalid_arrays_are_refused(x, y, reason):
    with pytest.raises(DataError, match=reason):
        from_arrays(x, y)


def test_a_test_part_of_another_shape_is_refused():
    with pytest.raises(DataError, match="must have the same shape and type"):
        from_arrays(np.zeros((2, 4, 4), np.uint8), [0, 1], test=(np.zeros((2, 5, 5), np.uint8), [0, 1]))


def test_a_test_share_of_one_is_refused():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        from_arrays(np.zeros((2, 4, 4), np.uint8), [0, 1], test_share=1)


def test_an_npz_with_x_y_and_client_is_a_data_set(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((10, 4, 4), np.uint8), y=np.arange(10) % 2, client=np.arange(10), classes=["cat", "dog"])
    data = load(str(path))
    assert (data.name, data.classes, len(data.train.client)) == ("mine", ("cat", "dog"), 8)
    assert data.source.name == "mine.npz"


def test_an_npz_with_a_test_part_keeps_it(tmp_path):
    x, y = np.zeros((4, 4, 4), np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x[:2], y_test=y[:2])
    assert len(load_npz(tmp_path / "mine.npz").test.y) == 2


def test_an_npz_without_labels_says_what_it_holds(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(DataError, match=r"mine.npz has no array 'y' for the labels \(or y_train, .*it holds x"):
        load_npz(tmp_path / "mine.npz")


def pictures(folder, sizes=(8, 8)):
    for name, colour in (("ant", (255, 0, 0)), ("bee", (0, 255, 0))):
        (folder / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", sizes, colour).save(folder / name / f"{i}.png")
        (folder / name / "notes.txt").write_text("not a picture")


def test_a_folder_of_images_by_class_is_a_data_set(tmp_path):
    pictures(tmp_path / "insects")
    data = load(str(tmp_path / "insects"))
    assert (data.name, data.classes) == ("insects", ("ant", "bee"))
    assert data.train.x.shape == (8, 3, 8, 8)
    assert data.train.x[data.train.y == 1][0, :, 0, 0].tolist() == [0, 255, 0]


def test_a_folder_with_train_and_test_parts_keeps_them(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "test")
    data = load_images(tmp_path, mode="L")
    assert (len(data.train.y), len(data.test.y), data.train.x.shape[1]) == (10, 10, 1)


def test_images_of_several_sizes_are_refused(tmp_path):
    pictures(tmp_path)
    Image.new("RGB", (9, 9)).save(tmp_path / "ant" / "z.png")
    with pytest.raises(DataError, match="images of 2 sizes, such as 8 x 8 and 9 x 9; resize"):
        load_images(tmp_path)


def test_a_damaged_image_is_named(tmp_path):
    pictures(tmp_path)
    (tmp_path / "ant" / "z.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"ant/z.png: the image cannot be decoded: cannot identify image file; replace"):
        load_images(tmp_path)


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="one folder of images for each class"):
        load_images(tmp_path)
    (tmp_path / "ant").mkdir()
    with pytest.raises(DataError, match=r"holds no images; known formats: [^;]*$"):
        load_images(tmp_path)
    (tmp_path / "ant" / "rome").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "ant" / "rome" / "z.png")
    with pytest.raises(DataError, match=r"no images in folders of classes, as in .*/CLASS, but ant/rome/z.png;"):
        load_images(tmp_path)
    (tmp_path / "ant" / "book.txt").write_text("once")
    with pytest.raises(DataError, match=r"holds no images, but texts, which task=next_token reads;"):
        load_images(tmp_path)


def test_a_folder_val_is_the_test_part_where_there_is_none_named_test(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "Valid")
    assert len(load_images(tmp_path).test.y) == 10
    pictures(tmp_path / "test")
    assert "not used: Valid" in load_images(tmp_path).notes


def test_folders_without_images_are_no_classes_and_what_is_not_read_is_named(tmp_path):
    pictures(tmp_path)
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "ant" / "more").mkdir()
    (tmp_path / "ant" / "x.tiff").write_bytes(b"")
    data = load_images(tmp_path)
    assert data.classes == ("ant", "bee")
    assert data.notes == (
        "not used: __MACOSX",
        "not used, since it is no image: ant/more and 3 more in folders of classes",
    )


def test_images_of_more_than_8_bits_are_refused_and_not_cut_off(tmp_path):
    pictures(tmp_path)
    Image.fromarray(np.full((8, 8), 4000, np.uint16)).save(tmp_path / "ant" / "z.png")
    with pytest.raises(
        DataError, match=r"ant/z.png: expected 8 bits .*, got an image of type I;16; scale it to 8 bits"
    ):
        load_images(tmp_path)


@pytest.mark.filterwarnings("error")
def test_palettes_with_transparency_are_read_without_a_warning(tmp_path):
    pictures(tmp_path)
    palette = Image.new("P", (8, 8))
    palette.putpalette([10, 20, 30])
    palette.save(tmp_path / "ant" / "z.png", transparency=b"\x00\x10")
    data = load_images(tmp_path)
    everything = np.concatenate([data.train.x, data.test.x])
    assert (everything == np.array([10, 20, 30], np.uint8)[:, None, None]).all(axis=(1, 2, 3)).sum() == 1


def test_a_too_large_image_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgma.data.files.images.LARGEST", 7)
    pictures(tmp_path)
    with pytest.raises(DataError, match="at most 7 pixels per side"):
        load_images(tmp_path)
