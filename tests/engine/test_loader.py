import gc
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from hires.comm import rehearsal
from hires.core.errors import RunError
from hires.data.source import open_data
from hires.engine.build import contexts_of
from hires.engine.loader import Loader, image_of, read_microbatches, slot_loader, split_steps
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.patience import until

SIZE = (12, 10)


class Numbers:
    """Images that hold their own number; can be slow, or broken at one of them."""

    num_classes = 5
    class_names = tuple("abcde")

    def __init__(self, delay_s: float = 0.0, broken: int | None = None) -> None:
        self.delay_s = delay_s
        self.broken = broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def label(self, i: int) -> int:
        return i % self.num_classes

    def window(self, i, rows, cols):
        time.sleep(self.delay_s)
        if i == self.broken:
            raise RunError(f"cannot read the image folder/{i}.tif: it is cut off")
        self.read.append(i)
        return np.full((3, rows[1] - rows[0], cols[1] - cols[0]), i, np.float32)


def loader(source, prefetch=2, dtype=torch.float32, **how) -> Loader:
    defaults = {
        "order": lambda step: list(range(4 * step, 4 * step + 4)),
        "num_microbatches": 2,
        "rect": (0, 6, 0, 10),
        "target": source.label,
        "steps": 3,
    }
    how = defaults | how
    parts = split_steps(how["order"], how["num_microbatches"], range(how["steps"]))
    image = how["rect"] and image_of(source, how["rect"])
    return Loader(read_microbatches(parts, image, how["target"], dtype), prefetch)


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


def test_images_have_the_layout_and_type_that_the_network_wants():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with_thread = loader(Numbers(), dtype=dtype)
        images, target = next(with_thread)
        with_thread.close()
        assert images.shape == (2, 3, 6, 10)
        assert images.dtype == dtype
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert target.dtype == torch.int64


def test_a_rank_without_pixels_reads_none():
    source = Numbers()
    got = list(loader(source, rect=None))
    assert all(m.images is None for m in got)
    assert [m.target.tolist() for m in got][:2] == [[0, 1], [2, 3]]
    assert source.read == []


def test_target_images_come_like_images():
    dtype = torch.bfloat16
    source = Numbers()
    target = partial(source.window, rows=(2, 5), cols=(4, 10))
    microbatch = next(loader(source, target=target, rect=None, dtype=dtype))
    assert microbatch.images is None
    assert microbatch.target is not None
    assert microbatch.target.shape == (2, 3, 3, 6)
    assert microbatch.target.dtype == dtype
    assert microbatch.target.is_contiguous(memory_format=torch.channels_last)
    assert microbatch.target[:, 0, 0, 0].tolist() == [0, 1]


def test_a_rank_that_needs_nothing_has_no_thread():
    config = config_of(parallel={"stages": 3}, steps=6)
    with rehearsal(1, shared_memory=False):
        [context] = contexts_of(plan_of(config), 1)
    idle = slot_loader(config, context, open_data(config), range(6))
    assert threads() == []
    assert list(idle) == [(None, None)] * 6


def test_after_the_last_microbatch_there_is_none():
    for prefetch in (0, 2):
        short = loader(Numbers(), steps=1, prefetch=prefetch)
        next(short)
        next(short)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(short)
        short.close()


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


def test_waiting_is_measured():
    slow = loader(Numbers(delay_s=0.03), steps=1)
    next(slow)
    assert 0.05 < slow.wait_s < 60
    slow.close()


def test_closing_stops_the_thread_and_may_be_repeated():
    endless = loader(Numbers(), steps=10**9)
    assert len(threads()) == 1
    endless.close()
    endless.close()
    assert threads() == []
    with pytest.raises(StopIteration):
        next(endless)


def test_a_forgotten_loader_stops_its_thread():
    forgotten = loader(Numbers(), steps=10**9)
    next(forgotten)
    del forgotten
    gc.collect()
    assert threads() == []


def test_a_process_ends_although_nobody_closed_the_loader():
    script = """
import torch
from hires.core.config.data_config import DataConfig
from hires.data.source import open_source
from hires.engine.loader import Loader, image_of, read_microbatches, split_steps
source = open_source(DataConfig(), (64, 64), 3, seed=0)
image, parts = image_of(source, (0, 64, 0, 64)), split_steps(lambda step: [0, 1], 1, range(10**9))
loader = Loader(read_microbatches(parts, image, source.label, torch.float32), 2)
next(loader)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
