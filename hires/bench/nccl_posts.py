"""Tries out NCCL with one rank: its communicators, and posts on streams as the executor makes them.

One GPU holds one rank of NCCL, so a message goes from the rank to itself: what is tried is that the
library loads, that several communicators live side by side, and that a grouped send and receive,
begun behind an event of the compute stream, arrives before what waits for it.
"""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUPS = 4
"""Communicators: halos, stages down and up, sums."""
NUMBERS = 1 << 20


def nccl_posts() -> tuple[bool, str]:
    """Returns whether all that was sent arrived, and what was done; a crash is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        process = mp.get_context("spawn").Process(target=_rank, args=(folder,), daemon=True)
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
            return False, "it was not done after 60 s"
        found = Path(folder, "found")
        if not found.exists():
            return False, f"the process ended with {process.exitcode}"
        version = ".".join(
            map(str, torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        )
        what = f"NCCL {version}: {GROUPS} communicators, sums and grouped posts"
        return found.read_text() == "ok", f"{what} {found.read_text()}"


def _rank(folder: str) -> None:
    store = f"file://{folder}/store"
    patience = datetime.timedelta(seconds=30)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store, rank=0, world_size=1, timeout=patience)
    groups = [dist.new_group([0]) for _ in range(GROUPS)]
    side, wrong = torch.cuda.Stream(), []  # type: ignore[no-untyped-call]
    for index, group in enumerate(groups):
        sent = torch.full((NUMBERS,), float(index), device=device)
        arrived = torch.zeros_like(sent)
        sent.mul_(2).add_(1)  # still under way on the compute stream when the send is posted
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            posts = [
                dist.P2POp(dist.isend, sent, 0, group),
                dist.P2POp(dist.irecv, arrived, 0, group),
            ]
            works = dist.batch_isend_irecv(posts)
        for work in works:
            work.wait()
        total = arrived.clone()
        dist.all_reduce(total, group=group)
        if not bool((total == 2.0 * index + 1).all()):
            wrong.append(f"communicator {index}")
    torch.cuda.synchronize()
    Path(folder, "found").write_text("ok" if not wrong else f"wrong on {', '.join(wrong)}")
    dist.destroy_process_group()
