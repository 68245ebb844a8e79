"""Predicts the memory of a GPU that no tensor takes: CUDA's own, libraries' and NCCL's buffers.

None of these figures was measured by hires: each stands with its source, and a check on a GPU is to
compare their sum with what the GPU reports.
"""

from __future__ import annotations

from hires.core.units import MIB
from hires.plan.channels import channels
from hires.plan.groups import groups
from hires.plan.hardware import NCCL
from hires.plan.plan import Plan

CONTEXT_BYTES = 450 * MIB
"""CUDA's context and the kernels of torch, cuDNN and cuBLAS that a step loads. An assumption for
CUDA 12 and 13, which load kernels when they are first called (CUDA_MODULE_LOADING=LAZY)."""
CUBLAS_BYTES = 8320 * 2**10
"""Workspace of cuBLAS, kept from its first product on: torch's default on GPUs before Hopper,
``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``; 32 MiB on Hopper."""
CONNECTION_BYTES = 4 * MIB + 512 * 2**10 + 4800 * 2**10
"""Buffers with which one rank receives from another on one of NCCL's own channels, one for each
protocol: 4 MiB (``NCCL_BUFFSIZE`` of its user guide), and those of LL and LL128 (its source)."""
LOOPS = 8
"""NCCL's own channels of a communicator for sums; 2 to 24, as NVLinks and network cards allow."""
MESSAGE_LOOPS = 2
"""The same for each two ranks of one for messages."""
FAN = 4
"""Ranks from which one receives in sums: one in a ring, three in a tree."""


def nccl_bytes(plan: Plan, rank: int) -> int:
    """Returns the buffers of a rank's communicators, all of which are connected at the start."""
    if plan.backend != NCCL:
        return 0
    sums = [min(FAN, len(group) - 1) for group in groups(plan) if rank in group]
    sources = [{pair[0] for pair in one.pairs if pair[1] == rank} for one in channels(plan)]
    loops = LOOPS * sum(sums) + MESSAGE_LOOPS * sum(map(len, sources))
    return loops * CONNECTION_BYTES
