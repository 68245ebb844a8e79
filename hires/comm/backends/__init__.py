"""Holds the backends; each file registers its own in ``BACKENDS`` of :mod:`.backend`."""

from hires.comm.backends import gloo_backend, mpi_backend, nccl, null, shm_backend

__all__ = ["gloo_backend", "mpi_backend", "nccl", "null", "shm_backend"]
