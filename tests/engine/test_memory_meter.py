"""What the measuring of memory asks of the allocator."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from hires.core.ranks.world import World
from hires.engine.memory_meter import keep_memory
from tests.helpers.ranks import run_ranks


def touched() -> int:
    """Returns how many pages come anew for 128 MiB in tensors of 16 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**22) for _ in range(8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults(world: World) -> tuple[int, int]:
    """Returns those of the first time and of a later one."""
    keep_memory(large=world.rank == 1)
    return touched(), min(touched() for _ in range(3))


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes the allocator of glibc")
def test_memory_that_was_freed_is_used_again():
    # Without the setting all pages come anew every time.
    for first, later in run_ranks(faults, 2):
        assert first > 10000
        assert later < first / 100
