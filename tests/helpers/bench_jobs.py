"""What the ranks of a benchmark do in tests."""

from __future__ import annotations

import os
import time

import torch

from hires.comm import all_reduce, barrier, make_groups
from hires.core.errors import PlanError


def add_up(rank, number):
    total = torch.tensor([float(number + rank)])
    all_reduce(total, group=make_groups([[0, 1]])[0])
    return rank, float(total)


def count(rank, number):
    yield from range(number) if rank == 0 else ["of the other rank"]


def refuse(rank):
    if rank == 1:
        raise PlanError("tile of 1 row is too small")
    barrier()


def die(rank):
    if rank == 1:
        os._exit(9)
    barrier()


def sleep(rank, folder):
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)
