"""Are digits, CIFAR-10's files and the overlapping classes read as their formats say?"""

from __future__ import annotations

import numpy as np
import pytest

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.content import KnownFiles, content_of
from hires.data.overlapping import OVERLAP
from hires.data.small_images import CIFAR10_RECORD, DIGITS
from hires.data.source import open_source
from tests.helpers.cifar10_files import cifar10_folder


def opened(size=(8, 8), channels=1, seed=0, **keys):
    return open_source(DataConfig(**keys), size, channels, seed)


def whole(source, i, size):
    return source.window(i, (0, size[0]), (0, size[1]))


def test_digits_are_those_of_scikit_learn():
    # Of scikit-learn 1.9.1: 1797 images, load_digits().target.
    source = opened(name="digits")
    assert len(source) == 1797
    assert [source.label(i) for i in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    first = (whole(source, 0, (8, 8))[0] + 2) * 4  # white is 16
    assert first[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert DIGITS.stat().st_size < 50_000


@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_window_of_a_digit_is_that_part_of_the_whole(fit):
    source = opened((20, 15), 3, name="digits", fit=fit)
    image = whole(source, 5, (20, 15))
    assert image.shape == (3, 20, 15)
    assert np.array_equal(source.window(5, (3, 17), (4, 9)), image[:, 3:17, 4:9])


def test_digits_of_another_size_are_refused_if_asked_for():
    with pytest.raises(ConfigError, match=r"8 x 8 pixels; use data\.fit=resize"):
        opened((9, 8), name="digits", fit="error")


def test_record_is_a_label_then_red_green_and_blue_row_by_row(tmp_path):
    folder = cifar10_folder(tmp_path / "c")
    source = opened((32, 32), 3, name="cifar10", path=str(folder), split="train")
    assert len(source) == 20
    raw = (folder / "data_batch_2.bin").read_bytes()[CIFAR10_RECORD : 2 * CIFAR10_RECORD]
    image = np.rint((whole(source, 5, (32, 32)) + 2) * 255 / 4)
    assert source.label(5) == raw[0] == 1
    for colour, row, column in ((0, 0, 1), (1, 3, 0), (2, 31, 31)):
        assert image[colour, row, column] == raw[1 + 1024 * colour + 32 * row + column]


def test_files_are_the_division_and_their_archive_s_folder_is_found(tmp_path):
    cifar10_folder(tmp_path / "cifar-10-batches-bin")
    of = {"name": "cifar10", "path": str(tmp_path)}
    sizes = [len(opened((32, 32), 3, **of, split=s)) for s in ("all", "train", "validation")]
    assert sizes == [24, 20, 4]
    contents = [content_of(DataConfig(**of, split=s), KnownFiles())[0] for s in ("all", "train")]
    assert [content.images for content in contents] == [6, 5]
    assert contents[0].digest != contents[1].digest


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda folder: (folder / "test_batch.bin").unlink(), "test_batch.bin is not there"),
        (lambda folder: [f.unlink() for f in folder.glob("data*")], "data_batch_1.bin is not"),
        (
            lambda folder: (folder / "data_batch_3.bin").write_bytes(b"\0" * 4000),
            "has 4000 bytes, and a record of CIFAR-10 has 3073",
        ),
        (
            lambda folder: (folder / "data_batch_3.bin").write_bytes(b"\x0b" * CIFAR10_RECORD),
            "record 0 has the label 11",
        ),
    ],
)
def test_files_that_are_not_cifar_10_are_refused(tmp_path, harm, text):
    folder = cifar10_folder(tmp_path / "c")
    harm(folder)
    with pytest.raises(ConfigError, match=text):
        opened((32, 32), 3, name="cifar10", path=str(folder))


def test_data_without_a_path_says_what_it_needs():
    with pytest.raises(ConfigError, match=r"data=cifar10 needs data\.path=FOLDER"):
        opened(name="cifar10")
    with pytest.raises(ConfigError, match="choose one of synthetic, textures, hard, digits"):
        opened(name="nothing")


def test_textures_are_the_made_images():
    made = opened((16, 12), 3, seed=3, name="synthetic")
    assert np.array_equal(
        whole(opened((16, 12), 3, seed=3, name="textures"), 7, (16, 12)), whole(made, 7, (16, 12))
    )


def test_hard_images_are_functions_of_seed_and_number_and_no_window_differs():
    source = opened((24, 18), 3, name="hard", classes=5)
    image = whole(source, 11, (24, 18))
    assert abs(image).max() <= 2
    assert np.array_equal(source.window(11, (5, 20), (3, 9)), image[:, 5:20, 3:9])
    again = opened((24, 18), 3, name="hard", classes=5)
    assert np.array_equal(whole(again, 11, (24, 18)), image)
    assert not np.array_equal(whole(again, 16, (24, 18)), image)  # another of the class


def test_neighbours_of_the_hard_classes_overlap_so_that_no_network_is_always_right():
    assert 0.70 < 1 / OVERLAP < 0.86
