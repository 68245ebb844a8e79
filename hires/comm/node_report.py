"""Measures what the nodes of a job have, for ``hires doctor``, with one rank on each.

It is started like the ranks of a run, so it fails as they would. Rank 0 writes the reports of all
ranks into ``nodes.json``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hires import comm
from hires.comm.agreements import gather_texts
from hires.core import streams
from hires.core.errors import HiresError
from hires.core.ranks import meeting, world
from hires.core.ranks.world import World, from_environment
from hires.core.store import file_names, provenance, records
from hires.core.store.files import write_atomically

_SUM_BYTES = 2**22  # of the tensor that is summed over the network
_REPEATS = 5
_SEEN_S = 10.0  # how long a file of another node may take to appear: file servers cache

log = logging.getLogger(__name__)


def main() -> int:
    """Measures as one rank of a world; returns the exit code."""
    folder = Path(sys.argv[1])
    world = from_environment()
    streams.setup_log(world.rank)
    try:
        records.require_seen(folder)
        world = meeting.with_secret(world, file_names.attempt_dir(folder, world.attempt))
        comm.init(world=world, timeout_s=records.read_config(folder).comm.timeout_s)
        reports = gather_texts(json.dumps(report(folder, world)), "an exchange of reports")
        if world.rank == 0:
            text = json.dumps({"nodes": [json.loads(one) for one in reports]})
            write_atomically(folder / file_names.NODES, text)
        comm.shutdown()
    except HiresError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


def report(folder: Path, world: World) -> dict[str, Any]:
    """Returns what this node has, and what the ranks measure together."""
    own, cuda = provenance.collect(), torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    facts = {
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        **{key: own[key] for key in ("hires", "git", "python", "host")},
        "torch": torch.__version__,
        "gpus": [cuda.get_device_name(i) for i in range(count)],
        "address": world.address,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "sees": _sees(folder, world.rank),
        "sum_s": _sum_s(world.size),
    }
    comm.barrier()
    return facts | {"time": time.time()}


def _sees(folder: Path, rank: int) -> bool:
    # Whether a file that rank 0 writes now is visible here.
    word = comm.broadcast_text(secrets.token_hex(8))
    if rank == 0:
        write_atomically(folder / word, "")
    comm.barrier()
    until = time.monotonic() + _SEEN_S
    while not (folder / word).exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _sum_s(size: int) -> float | None:
    # How long it takes to sum a tensor over all ranks; None if the sum is wrong.
    times, is_right = [], True
    for _ in range(_REPEATS):
        ones = torch.ones(_SUM_BYTES // 4)
        comm.barrier()
        began_s = time.perf_counter()
        comm.all_reduce(ones)
        times.append(time.perf_counter() - began_s)
        is_right = is_right and bool((ones == size).all())
    return statistics.median(times) if is_right else None


if __name__ == "__main__":
    world.run(main)
