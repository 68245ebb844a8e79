"""Declares the backends whose classes are in ``hires.comm.backends``."""

from __future__ import annotations

from hires.core.message_backends import BACKEND_FACTS, BackendFacts

for _name, _facts in {
    "gloo": BackendFacts(
        "torch.distributed over gloo; ranks of one machine share memory for small messages"
    ),
    "mpi": BackendFacts(
        "The MPI whose launcher starts the ranks (launcher=mpirun, or slurm with an MPI)"
    ),
    "nccl": BackendFacts(
        "From GPU to GPU over NCCL, one rank on each; barriers and agreements over gloo",
        has_streams=True,
    ),
    "shm": BackendFacts(
        "Memory that the ranks of one machine share carries every message", one_machine=True
    ),
}.items():
    BACKEND_FACTS.register(_name)(_facts)
