"""What an MPI that reads the memory of GPUs is given as it lies, and what goes through the host."""

from __future__ import annotations

import pytest
import torch

from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.transport import Transport
from hires.core.ranks.mpi_library import GpuSupport


@pytest.mark.parametrize(
    ("support", "reached"),
    [
        (GpuSupport(False, False), []),
        (GpuSupport(True, False), ["isend", "all_to_all"]),
        (GpuSupport(True, True), ["isend", "all_to_all", "all_reduce", "broadcast"]),
    ],
)
def test_operations_whose_tensors_need_no_host(support, reached):
    backend = MpiBackend()
    backend._gpus = support
    staging = Transport({"mpi": backend}).staging
    methods = ["isend", "all_to_all", "all_reduce", "broadcast"]
    found = [one for one in methods if "cuda" in staging("mpi", one, torch.float32).reaches]
    assert found == reached
    # Sums of halves are ours, on the host; so are those that no operation is named for.
    assert "cuda" not in staging("mpi", "all_reduce", torch.bfloat16).reaches
    assert "cuda" not in staging("mpi").reaches
    assert "cpu" in staging("mpi", "isend", torch.float32).reaches
