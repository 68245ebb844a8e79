"""Which images a step, a part of the data or a class gets follows from seed and config alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tifffile

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.content import content_of
from hires.data.opening import open_data, open_source
from hires.data.order import balanced, ordered, step_images, step_indices
from hires.data.sources.arrays import CIFAR10_RECORD
from hires.engine.loader import replica_samples
from tests.helpers.image_files import cifar10_folder
from tests.helpers.layouts import config_of


def line(batch: int, steps: int, length: int, seed: int, shuffle: bool) -> list[int]:
    epoch = ordered(Labels(length), seed, shuffle)
    return [i for step in range(steps) for i in step_indices(step, batch, length, epoch)]


@pytest.mark.parametrize("batch", [3, 20])
def test_every_epoch_has_every_image_once_whatever_the_batch(batch):
    how = {"length": 7, "seed": 1, "shuffle": True}
    assert line(3, 3, length=5, seed=0, shuffle=False) == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    drawn = line(batch, 21, **how)
    epochs = [tuple(drawn[start : start + 7]) for start in range(0, len(drawn) - 6, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({*epochs[:3]}) == 3
    assert drawn == line(1, 21 * batch, **how)
    assert drawn[:21] != line(1, 21, **{**how, "seed": 2})
    far = step_indices(10**9, 4, 1000, ordered(Labels(1000), 0, True))
    assert all(type(i) is int and 0 <= i < 1000 for i in far)


class Labels:
    """Stands for a data set of classes of some sizes."""

    def __init__(self, *counts):
        self.labels = [label for label, count in enumerate(counts) for _ in range(count)]

    def __len__(self):
        return len(self.labels)

    def label(self, i):
        return self.labels[i]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("counts", [(5, 5), (11, 1, 3, 2)])
def test_balanced_classes_come_equally_often(counts, shuffle):
    source = Labels(*counts)
    order, length = balanced(source, 3, shuffle), len(source)
    epochs = [order(epoch) for epoch in range(8)]
    for drawn in epochs:
        held = Counter(source.label(i) for i in drawn)
        assert (len(drawn), len(held)) == (length, len(counts))
        assert max(held.values()) - min(held.values()) <= 1
    # Of a class, no image comes again before all others of it have come.
    seen = Counter(i for drawn in epochs for i in drawn)
    for label in range(len(counts)):
        times = [seen[i] for i in range(length) if source.label(i) == label]
        assert max(times) - min(times) <= 1
    assert (epochs[0] != epochs[1]) == (shuffle or max(counts) > min(counts))
    classes = [[source.label(i) for i in drawn] for drawn in epochs]
    assert (classes[0] != classes[1]) == shuffle
    other = balanced(source, 4, shuffle)(0)  # of another seed
    assert (sorted(other) != sorted(epochs[0])) == (shuffle and max(counts) > min(counts))
    with pytest.raises(ConfigError, match=r"data\.balance=true: the images have one class only"):
        balanced(Labels(3), 0, True)


def test_labels_are_read_once_for_all_steps():
    class Counting(Labels):
        reads = 0

        def label(self, i):
            self.reads += 1
            return super().label(i)

    config = config_of(data={"name": "synthetic", "balance": True}, batch=6)
    source = Counting(5, 9)
    for step in range(4):
        step_images(config, source, step)
    assert source.reads == 14


def test_balanced_steps_follow_each_other_in_all_replicas():
    keys = {"name": "synthetic", "classes": 3, "length": 20, "balance": True}
    config = config_of(data=keys, batch=6, parallel={"replicas": 2})
    source = open_data(config)
    steps = [step_images(config, source, step) for step in range(7)]
    order = balanced(source, config.seed, True)
    assert [i for step in steps for i in step][:40] == [*order(0), *order(1)]
    parts = [replica_samples(config, source, 2, replica) for replica in (0, 1)]
    assert [*parts[0], *parts[1]] == steps[2]


def test_changed_images_count_on_from_epoch_to_epoch_within_a_step():
    config = config_of(data={"length": 5, "shuffle": False}, batch=4, augment={"flip": "both"})
    source = open_data(config)
    steps = [replica_samples(config, source, step, 0) for step in range(4)]
    assert [i for step in steps for i in step] == [*range(16)]


def opened(size=(8, 8), channels=3, seed=0, **keys):
    return open_source(DataConfig(**keys), size, channels, seed)


def names(source):
    return [source.name(i) for i in range(len(source))]


SYNTHETIC = {"name": "synthetic", "classes": 3, "length": 60, "validation": 0.2}


def test_parts_are_disjoint_whole_stratified_and_follow_the_split_seed_alone():
    everything, train, held = (opened(**SYNTHETIC, split=s) for s in ("all", "train", "validation"))
    assert sorted([*names(train), *names(held)], key=int) == names(everything)
    assert Counter(map(held.label, range(len(held)))) == {0: 4, 1: 4, 2: 4}
    first = everything.window(int(held.name(0)), (0, 8), (0, 8))
    assert np.array_equal(held.window(0, (0, 8), (0, 8)), first)
    assert names(opened(**SYNTHETIC, split="validation", seed=5)) == names(held)
    assert names(opened(**SYNTHETIC, split="validation", split_seed=1)) != names(held)
    few = {**SYNTHETIC, "length": 6, "validation": 0.01}
    assert len(opened(**few, split="validation")) == 3  # one of each class
    assert len(opened(**few, split="train", test=0.9)) == 3
    with pytest.raises(ConfigError, match=r"data\.split=validation: no class has two images"):
        opened(**{**few, "length": 3}, split="validation")


def test_drawn_images_follow_the_seed():
    each = [opened(name=name, seed=seed) for name in ("synthetic", "hard") for seed in (0, 1)]
    assert len({source.window(0, (0, 8), (0, 8)).tobytes() for source in each}) == 4


def test_images_of_the_test_are_in_no_other_part():
    splits = ("train", "validation", "test")
    parts = [names(opened(**SYNTHETIC, split=split, test=0.1)) for split in splits]
    assert parts[1] == names(opened(**SYNTHETIC, split="validation"))
    assert [len(part) for part in parts] == [42, 12, 6]
    assert len({*parts[0], *parts[1], *parts[2]}) == 60
    with pytest.raises(ConfigError, match=r"data\.split=test: no images are set apart"):
        opened(**SYNTHETIC, split="test")


def test_folders_or_a_file_divide_the_images(tmp_path):
    def write(*paths):
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(tmp_path / path, np.zeros((8, 8, 3), np.uint8))

    def part(split, **keys):
        source = opened(name="folder", path=str(tmp_path), split=split, **keys)
        assert source.class_names == ("cat", "dog")
        return names(source)

    write("train/cat/1.tif", "train/dog/2.tif", "val/cat/3.tif", "val/dog/4.tif")
    write("validation/cat/6.tif")  # of several names the first counts
    assert part("train") == ["cat/1.tif", "dog/2.tif"]
    assert part("validation") == ["cat/3.tif", "dog/4.tif"]
    (tmp_path / "parts.csv").write_text("name,split\ntrain/cat/1.tif,validation\n")
    of = {"name": "images", "path": str(tmp_path), "split_file": "parts.csv"}
    assert names(opened(**of, split="validation")) == ["train/cat/1.tif"]
    with pytest.raises(ConfigError, match=r"has train and val, but no folder test"):
        part("test")
    write("test/cat/5.tif")  # a class of one part only would shift labels
    with pytest.raises(ConfigError, match=r"only train has the class 'dog'"):
        part("test")
    tmp_path /= "listed"
    write("cat/1.tif", "cat/2.tif", "dog/3.tif", "dog/4.tif", "dog/5.tif")
    listed = tmp_path / "parts.csv"
    listed.write_text(f'name,split\n"{"a" * 200_000}",train\n')
    with pytest.raises(ConfigError, match=r"parts\.csv cannot be read: field larger than field"):
        part("train", split_file="parts.csv")
    listed.write_text("name,split\ncat/2.tif,train\ndog/5.tif,train\ndog/3.tif,validation\n")
    assert part("train", split_file="parts.csv") == ["cat/2.tif", "dog/5.tif"]
    assert part("validation", split_file="parts.csv") == ["dog/3.tif"]
    for text, words in (
        (listed.read_text(), r"lists no image for data\.split=test"),
        ("name,split\ncat/9.tif,test\n", r"'cat/9\.tif' is none of the data's images"),
        ("name,split\ncat/2.tif,held\n", "'held' is no part; use train, validation, test"),
        ("image,split\n", "its first line must name name,split"),
    ):
        listed.write_text(text)
        with pytest.raises(ConfigError, match=words):
            part("test", split_file="parts.csv")


def test_digits_are_those_of_scikit_learn():
    # load_digits() of scikit-learn 1.9.1: 1797 images.
    source = opened(channels=1, name="digits")
    assert len(source) == 1797
    assert [source.label(i) for i in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    first = (source.window(0, (0, 8), (0, 8))[0] + 2) * 4  # white is 16
    assert first[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    border = opened((10, 10), 1, name="digits", fit="crop").window(0, (0, 1), (0, 10))
    assert not border.any()  # grey
    with pytest.raises(ConfigError, match=r"8 x 8 pixels; use data\.fit=resize"):
        opened((9, 8), name="digits", fit="error")
    with pytest.raises(ConfigError, match="unknown data 'nothing'; choose one of"):
        opened(name="nothing")


def test_record_of_cifar10_is_a_label_then_red_green_and_blue_row_by_row(tmp_path):
    folder = cifar10_folder(tmp_path / "cifar-10-batches-bin")
    of = {"name": "cifar10", "path": str(tmp_path)}
    sizes = [len(opened((32, 32), **of, split=s)) for s in ("all", "train", "validation")]
    assert sizes == [24, 20, 4]
    contents = [content_of(DataConfig(**of, split=s)) for s in ("all", "train")]
    assert [content.images for content in contents] == [6, 5]
    source = opened((32, 32), **of, split="train")
    raw = (folder / "data_batch_2.bin").read_bytes()[CIFAR10_RECORD : 2 * CIFAR10_RECORD]
    image = np.rint((source.window(5, (0, 32), (0, 32)) + 2) * 255 / 4)
    assert source.label(5) == raw[0] == 1
    for colour, row, column in ((0, 0, 1), (1, 3, 0), (2, 31, 31)):
        assert image[colour, row, column] == raw[1 + 1024 * colour + 32 * row + column]
    for content, text in (
        (b"\0" * 4000, "has 4000 bytes, and a record of CIFAR-10 has 3073"),
        (b"\x0b" * CIFAR10_RECORD, "record 0 has the label 11"),
    ):
        (folder / "data_batch_3.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            opened((32, 32), **of)
