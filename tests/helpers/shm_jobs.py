"""What ranks do in tests of shared memory as a backend."""

from __future__ import annotations

import os
import signal
import time

import torch

from hires import comm
from hires.comm.backends.shared import SharedMemory
from hires.comm.backends.shm_backend import ShmBackend
from hires.comm.transport import transport
from hires.core.errors import CommError
from hires.core.ranks.world import World
from tests.helpers.patience import PATIENCE_S


def killed(world: World, backends: list[str]) -> list[str]:
    """Returns how each kind of wait ended for a rank whose peer was killed in the meantime."""
    if world.rank == 1:  # a process of its own, so that this one can answer
        if not (child := os.fork()):
            comm.init(backends, world=world, timeout_s=60)
            comm.new_group()
            comm.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        return []
    comm.init(backends, world=world, timeout_s=PATIENCE_S)
    group = comm.new_group()
    comm.barrier()
    time.sleep(0.2)
    numbers, told = torch.zeros(100_000), []
    for wait in (
        lambda: comm.recv(torch.zeros(1), 1),
        lambda: comm.send(numbers, 1),
        lambda: comm.all_reduce(numbers, group=group),
        lambda: comm.all_reduce(numbers, async_op=True).wait(),
    ):
        try:
            wait()
            told.append("nothing")
        except CommError as error:
            told.append(str(error))
    comm.shutdown()
    return told


def spins_of_bound_ranks(world: World) -> list[int]:
    """Returns how long waits look: of the backend and of a group, by a core each and by one."""
    cores, found = sorted(os.sched_getaffinity(0)), []
    for own in (cores[world.rank % len(cores)], cores[0]):
        os.sched_setaffinity(0, {own})
        comm.init(["gloo", "shm"], world=world, timeout_s=PATIENCE_S)
        [group] = comm.make_groups([[0, 1]], 1).values()
        backend = transport.backends["shm"]
        assert isinstance(backend, ShmBackend)
        assert isinstance(group.shared, SharedMemory)
        found += [backend._spins, group.shared._counters._spins]
        comm.shutdown()
    return found
