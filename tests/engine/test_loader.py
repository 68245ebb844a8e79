"""Do microbatches come in order, of what a rank needs, read ahead, and does no thread stay?"""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from hires.core.errors import RunError
from hires.engine.loader import Loader, image_of, read_microbatches, split_steps
from tests.helpers.patience import until


class Numbers:
    """Images that hold their own number; can be broken at one of them."""

    num_classes = 5
    class_names = tuple("abcde")

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def label(self, i: int) -> int:
        return i % self.num_classes

    def window(self, i, rows, cols):
        if i == self.broken:
            raise RunError(f"cannot read the image folder/{i}.tif: it is cut off")
        self.read.append(i)
        return np.full((3, rows[1] - rows[0], cols[1] - cols[0]), i, np.float32)


def loader(source, prefetch=2, dtype=torch.float32, rect=(0, 6, 0, 10), target=None, steps=3):
    parts = split_steps(lambda step: list(range(4 * step, 4 * step + 4)), 2, range(steps))
    image = rect and image_of(source, rect)
    return Loader(read_microbatches(parts, image, target or source.label, dtype), prefetch)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize("prefetch", [0, 2, 50])
def test_microbatches_come_in_order(prefetch):
    got = list(loader(Numbers(), prefetch=prefetch))
    assert [m.images[:, 0, 0, 0].tolist() for m in got] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11],
    ]  # fmt: skip
    assert [m.target.tolist() for m in got] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_images_have_the_layout_and_type_that_the_network_wants(dtype):
    source = Numbers()
    with_labels = loader(source, dtype=dtype)
    target = partial(source.window, rows=(2, 5), cols=(4, 10))
    with_images = loader(source, dtype=dtype, target=target, rect=None)
    (images, labels), (none, targets) = next(with_labels), next(with_images)
    assert (labels.dtype, none) == (torch.int64, None)
    wide = torch.promote_types(dtype, torch.float32)  # what outputs are compared with
    for made, *facts in ((images, (2, 3, 6, 10), dtype), (targets, (2, 3, 3, 6), wide)):
        assert [made.shape, made.dtype] == facts
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert made[:, 0, 0, 0].tolist() == [0, 1]
    with_labels.close(), with_images.close()


def test_it_reads_ahead_as_far_as_asked_and_no_further():
    source = Numbers()
    ahead = loader(source, prefetch=2)
    until(lambda: len(source.read) == 4)
    time.sleep(0.05)
    assert source.read == [0, 1, 2, 3]
    next(ahead)
    until(lambda: len(source.read) == 6)
    ahead.close()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_broken_image_is_named_in_its_turn(prefetch):
    source = loader(Numbers(broken=5), prefetch=prefetch)
    for _ in range(2):
        next(source)
    for _ in range(1 + bool(prefetch)):  # the error stays
        with pytest.raises(RunError, match=r"folder/5\.tif"):
            next(source)
    source.close()


def test_a_forgotten_loader_stops_its_thread():
    forgotten = loader(Numbers(), steps=10**9)
    next(forgotten)
    del forgotten
    gc.collect()
    assert threads() == []
