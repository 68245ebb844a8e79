"""What the measuring of memory asks of the allocator."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from hires.core.ranks.world import World
from hires.engine.memory_meter import give_back_memory, keep_memory
from tests.helpers.ranks import run_ranks


def touched() -> int:
    """Returns how many pages come anew for 128 MiB in tensors of 16 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**22) for _ in range(8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults(world: World) -> tuple[int, int, int]:
    """Returns those of the first time, of a later one, and after memory was given back."""
    keep_memory(large=world.rank == 1)
    first, later = touched(), min(touched() for _ in range(3))
    give_back_memory()
    return first, later, touched()


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes the allocator of glibc")
def test_memory_that_was_freed_is_used_again_until_it_is_given_back():
    # Without the setting all pages come anew every time.
    for first, later, anew in run_ranks(faults, 2):
        assert first > 10000
        assert later < first / 100
        assert anew > first / 4
