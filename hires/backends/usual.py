"""Declares the backends whose classes are in ``hires.comm.backends``."""

from __future__ import annotations

from hires.core.message_backends import BACKEND_FACTS, BackendFacts

_CLASSES = "hires.comm.backends."
for _name, _facts in {
    "gloo": BackendFacts(
        "torch.distributed over gloo; ranks of one machine share memory for small messages",
        f"{_CLASSES}gloo_backend:GlooBackend",
    ),
    "mpi": BackendFacts(
        "The MPI whose launcher starts the ranks (launcher=mpirun, or slurm with an MPI)",
        f"{_CLASSES}mpi_backend:MpiBackend",
    ),
    "nccl": BackendFacts(
        "From GPU to GPU over NCCL, one rank on each; barriers and agreements over gloo",
        f"{_CLASSES}nccl:NcclBackend",
        has_streams=True,
    ),
    "shm": BackendFacts(
        "Memory that the ranks of one machine share carries every message",
        f"{_CLASSES}shm_backend:ShmBackend",
        compares_calls=True,
        one_machine=True,
        shares_memory=True,
    ),
}.items():
    BACKEND_FACTS.register(_name)(_facts)
