"""Predicts the memory of a GPU that no tensor takes: CUDA's own, libraries' and NCCL's buffers.

None of these figures was measured by hires: each stands with its source, and a check on a GPU is to
compare their sum with what the GPU reports.
"""

from __future__ import annotations

import re

from hires.core.config.run_config import RunConfig
from hires.core.units import MIB
from hires.plan.channels import channels
from hires.plan.groups import groups
from hires.plan.message_routes import backends_of_plan
from hires.plan.plan import Plan
from hires.plan.routes import STREAMED

CONTEXT_BYTES = 450 * MIB
"""CUDA's context and the kernels of torch, cuDNN and cuBLAS that a step loads. An assumption for
CUDA 12 and 13, which load kernels when they are first called (CUDA_MODULE_LOADING=LAZY)."""
CUBLAS_BYTES = 8320 * 2**10
"""One workspace of cuBLAS, kept from its first product on: torch's default on GPUs before Hopper,
``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``."""
HOPPER, HOPPER_CUBLAS_BYTES = 9.0, 32 * MIB
"""Compute capability from which that default is ``:4096:8``, and its size."""
HOST_CONTEXT_BYTES = 512 * MIB
"""Memory of the host that CUDA and the libraries of a torch for it take beside those of a torch for
CPUs. An assumption."""
PINNED_BATCHES = 2
"""Microbatches of a loader in pinned memory: one is read while the one before is copied."""
CONNECTION_BYTES = 4 * MIB + 512 * 2**10 + 4800 * 2**10
"""Buffers with which one rank receives from another on one of NCCL's own channels, one for each
protocol: 4 MiB (``NCCL_BUFFSIZE`` of its user guide), and those of LL and LL128 (its source)."""
LOOPS = 8
"""NCCL's own channels of a communicator for sums; 2 to 24, as NVLinks and network cards allow."""
MESSAGE_LOOPS = 2
"""The same for each two ranks of one for messages."""
FAN = 4
"""Ranks from which one receives in sums: one in a ring, three in a tree."""


def cublas_workspaces(config: RunConfig) -> list[int]:
    """Returns the sizes of cuBLAS's workspaces on a GPU of a run; of an unknown GPU before Hopper.

    Torch keeps one for each handle and stream, and a handle for each thread that computes products:
    the main one, and in training that of the backward pass. An assumption after torch's source.
    ``CUBLAS_WORKSPACE_CONFIG`` of ``cluster.environment`` holds ``:KiB:count``, once or more often.
    """
    chosen = config.cluster.environment.get("CUBLAS_WORKSPACE_CONFIG", "")
    if re.fullmatch(r"(:\d+:\d+)+", chosen):
        pairs = re.findall(r":(\d+):(\d+)", chosen)
        each = sum(int(kib) * int(count) for kib, count in pairs) * 2**10
    else:
        capability = config.cluster.gpu_capability
        each = HOPPER_CUBLAS_BYTES if capability and capability >= HOPPER else CUBLAS_BYTES
    return [each] * (2 if config.task.name == "train" else 1)


def pinned_bytes(num_bytes: int) -> int:
    """Returns what torch pins for a tensor: the next power of two, which it keeps.

    Source: CachingHostAllocator.h of torch 2.13.

    >>> pinned_bytes(3 * 2**20) // 2**20, pinned_bytes(0)
    (4, 0)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def nccl_bytes(plan: Plan, rank: int) -> int:
    """Returns the buffers of a rank's communicators, all of which are connected at the start."""
    if {*STREAMED}.isdisjoint(backends_of_plan(plan)):
        return 0
    sums = [min(FAN, len(group) - 1) for group in groups(plan) if rank in group]
    sources = [{pair[0] for pair in one.pairs if pair[1] == rank} for one in channels(plan)]
    loops = LOOPS * sum(sums) + MESSAGE_LOOPS * sum(map(len, sources))
    return loops * CONNECTION_BYTES
