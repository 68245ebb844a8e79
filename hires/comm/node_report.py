"""Checks the nodes of a job for ``hires doctor``, with one rank on each.

    facts-rank0000.json   what the node has; written before the ranks meet
    met-rank0000.json     what the ranks measured together: sums, clocks, visible files

It is started like the ranks of a run, so it fails as they would.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires import comm
from hires.comm.backends import rendezvous
from hires.core import log as logs
from hires.core.errors import HiresError
from hires.core.ranks import meeting, network, rank_process
from hires.core.ranks.world import World, from_environment
from hires.core.store import file_names, provenance, records
from hires.core.store.files import cannot_write, write_atomically, write_rate

SUM_BYTES = 2**22  # of the tensor that is summed over the network
_REPEATS = 5
_NCCL_S = 120.0  # longest wait for another rank while NCCL is tried
_SEEN_S = 10.0  # how long a file of another node may take to appear: file servers cache

log = logging.getLogger(__name__)


def main() -> int:
    """Checks as one rank of a world; returns the exit code."""
    folder = Path(sys.argv[1])
    world = from_environment()
    logs.setup(world.rank)
    try:
        records.require_seen(folder)
        write_atomically(folder / f"facts-rank{world.rank:04d}.json", json.dumps(facts(folder)))
        world = meeting.with_secret(world, file_names.attempt_dir(folder, world.attempt))
        comm.init(world=world, timeout_s=records.read_config(folder).comm.timeout_s)
        report = meet(folder, world)
        write_atomically(folder / f"met-rank{world.rank:04d}.json", json.dumps(report))
        comm.barrier()
        comm.shutdown()
    except HiresError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


def facts(folder: Path) -> dict[str, Any]:
    """Returns what this node has, and how fast it writes into a folder."""
    cuda = torch.cuda
    count, own = cuda.device_count() if cuda.is_available() else 0, provenance.collect()
    pairs = itertools.permutations(range(count), 2)
    try:
        bytes_per_s = write_rate(folder)
    except OSError as error:
        raise cannot_write(folder / "probe", error) from error
    return {
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "time": time.time(),
        **{key: own[key] for key in ("hires", "git", "python", "host")},
        "torch": torch.__version__,
        "gpus": [cuda.get_device_name(i) for i in range(count)],
        "apart": [pair for pair in pairs if not cuda.can_device_access_peer(*pair)],
        "bytes_per_s": bytes_per_s,
    }


def meet(folder: Path, world: World) -> dict[str, Any]:
    """Returns what the ranks measure together."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return {
        "address": world.address,
        "port": world.port,
        "interface": interface,
        "own_address": network.address_of(interface) if interface else None,
        "ahead_s": _ahead_s(),
        "unseen": _unseen(folder, world),
        "sum_s": _sum_s(world, torch.ones(SUM_BYTES // 4)),
        "nccl": _nccl(world),
    }


def _ahead_s() -> float:
    # By how much this rank's clock is ahead of rank 0's, give or take a message.
    ahead = []
    for _ in range(_REPEATS):
        comm.barrier()
        now = time.time()
        first = torch.tensor([now], dtype=torch.float64)
        comm.broadcast(first, 0)
        ahead.append(now - float(first))
    return statistics.median(ahead)


def _unseen(folder: Path, world: World) -> list[int]:
    # The ranks whose file, written now, is not visible here.
    token = comm.broadcast_text(secrets.token_hex(8))
    files = [folder / f"word-rank{rank:04d}" for rank in range(world.size)]
    write_atomically(files[world.rank], token)
    comm.barrier()

    unseen, until = [*range(world.size)], time.monotonic() + _SEEN_S
    while unseen and time.monotonic() < until:
        for rank in [*unseen]:
            with contextlib.suppress(OSError):
                if files[rank].read_text(encoding="utf-8") == token:
                    unseen.remove(rank)
        time.sleep(0.1 if unseen else 0.0)
    return unseen


def _sum_s(
    world: World, ones: torch.Tensor, add_up: Callable[[torch.Tensor], Any] = comm.all_reduce
) -> float | None:
    # How long it takes to sum a tensor over all ranks; None if the sum is wrong.
    times, right = [], True
    for _ in range(_REPEATS):
        given = ones.clone()
        comm.barrier()
        began_s = time.perf_counter()
        add_up(given)
        right = right and bool((given == world.size).all())  # waits for the device, too
        times.append(time.perf_counter() - began_s)
    return statistics.median(times) if right else None


def _nccl(world: World) -> dict[str, Any] | None:
    # How long NCCL takes for the same sum, or why it fails; None without GPUs.
    has = torch.cuda.is_available() and dist.is_nccl_available()
    if comm.max_all(int(not has)):
        return None
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    try:
        rendezvous.torch_world(world, _NCCL_S)
        add_up = functools.partial(dist.all_reduce, group=dist.new_group(backend="nccl"))
        return {"sum_s": _sum_s(world, torch.ones(SUM_BYTES // 4, device=device), add_up)}
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0][:300]}


if __name__ == "__main__":
    rank_process.run(main)
