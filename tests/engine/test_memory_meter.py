"""What the measuring of memory asks of the allocator."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hires.engine import memory_meter
from hires.engine.memory_meter import PeakMeter

FAULTS = """
import resource
import torch
from hires.engine.memory_meter import keep_memory
{prepare}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**22) for _ in range(8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
print(first, min(faults() for _ in range(3)))
"""


LARGE = FAULTS.replace("2**22", "2**24").replace("range(8)", "range(3)")
"""Tensors of 64 MiB."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes the allocator of glibc")
def test_memory_that_was_freed_is_used_again_until_it_is_given_back():
    # 128 MiB in tensors of 16 MiB: without the setting all pages come anew every time.
    script = FAULTS.format(prepare="keep_memory()")
    script += "from hires.engine.memory_meter import give_back_memory\n"
    script += "faults(); give_back_memory(); print(faults())\n"
    large = LARGE.format(prepare="keep_memory(large=True)")
    for text in (script, large):
        words = [sys.executable, "-c", text]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        first, later, *anew = map(int, done.stdout.split())
        assert first > 10000
        assert later < first / 100
        assert all(one > first / 4 for one in anew)


@pytest.mark.parametrize(
    ("free", "limit", "kept"),
    [(597, None, True), (596, None, False), (None, None, False), (9999, 148, False)],
)
def test_large_tensors_are_kept_only_with_room_for_all_ranks(monkeypatch, free, limit, kept):
    monkeypatch.setattr(memory_meter, "free_bytes", lambda: free)
    meter = object.__new__(PeakMeter)
    meter._ranks, meter._limit = 4, limit
    assert meter._has_room(149) == kept
