"""Measures the shared memory that a rank touches of a backend."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from hires import comm
from hires.core.ranks.world import World
from hires.engine.backend_memory import backend_bytes
from hires.plan.event import BYTES, JOINT, POSTS
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.routes import MEMORY


def shared_bytes() -> int:
    """Returns the bytes of shared memory that this process has touched."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssShmem:")]
    return int(line.split()[1]) * 1024


def touched_of_rank(world: World, plan: dict[str, Any], steps: int) -> tuple[int, int]:
    """Returns what the messages of a plan on whole backends have touched, and the prediction."""
    made = Plan.from_dict(plan)
    comm.init(["gloo", *MEMORY], world=world, timeout_s=30)
    own = {index: comm.new_group(ranks) for index, ranks in enumerate(groups(made))}
    own[-1] = comm.new_group([*range(world.size)])
    before = shared_bytes()
    for _ in range(steps):
        handles = []
        for event in events(made, world.rank):
            if event.kind not in (*POSTS, *JOINT) or event.route is None:
                continue
            if event.route.backend not in MEMORY:
                continue
            numbers = torch.zeros(math.prod(event.shape), dtype=getattr(torch, event.dtype))
            assert numbers.nbytes == math.prod(event.shape) * BYTES[event.dtype]
            name = event.route.backend
            if event.kind in POSTS:
                begin = comm.isend if event.kind == "send" else comm.irecv
                handles.append(begin(numbers, event.peer, tag=event.tag, backend=name))
            else:
                comm.all_reduce(numbers, group=own[event.peer], backend=name)
        for handle in handles:
            handle.wait()
    found = shared_bytes() - before, backend_bytes(made, world.rank)
    comm.shutdown()
    return found
