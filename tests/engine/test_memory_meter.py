"""What the measuring of memory asks of the allocator."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes the allocator of glibc")
def test_memory_that_was_freed_is_used_again():
    # 128 MiB in tensors of 16 MiB: without the setting all pages come anew every time.
    script = FAULTS.format(prepare="keep_memory()")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    first, later = map(int, done.stdout.split())
    assert first > 10000
    assert later < first / 100
