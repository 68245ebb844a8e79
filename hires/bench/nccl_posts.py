"""Tries out NCCL with one rank, on the way that messages of a run take.

One GPU holds one rank of NCCL, so its messages go to itself (:mod:`hires.bench.echo_backend`). Two
programs post and wait through :mod:`hires.comm`, on the communicators of the plan:

    steps      the executor of the middle tile of three, in two directions: halos, gathers of
               statistics, early and coalesced sums, recomputed borders while halos travel; the
               losses and parameters are bitwise those of the same steps with copies in place of
               messages
    pipeline   all ranks of a mirrored pipeline in turn: each message arrives whole, behind the
               computation that made it

Without NCCL a stand-in fills what a message brings when it is waited for, and with NaN before.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.bench.echo_backend import Copies, EchoBackend
from hires.bench.ranks import run_ranks
from hires.comm.backends import rendezvous
from hires.comm.backends.known_backends import BACKENDS, REACHES
from hires.comm.stream_channels import open_channels
from hires.comm.transport import transport
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import RunError
from hires.core.ranks.world import World
from hires.core.store.reading import Values
from hires.engine.build import build_rank
from hires.engine.device import RankDevice, open_device, to_host
from hires.nets.trace import trace_config
from hires.parallel.cursor import WAITS
from hires.plan.channels import Channel, channels
from hires.plan.event import POSTS, Event
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events

MIDDLE = 1
"""The rank that stands for all: the middle one of three tiles."""
STEPS = 2
TIMEOUT_S = 120.0
BASE: Values = {
    "device": "cuda",
    "image": 48,  # its maps divide by three down to the last
    "batch": 4,
    "steps": STEPS,
    "measure": {"warmup": 0},
    "seed": 1,
    # Without max pools, whose backward pass adds in any order on a GPU.
    "model": {"name": "mpi4dl_resnet", "n": 1, "classes": 10},
    "data": {"length": 16},
    "comm": {"backend": "nccl"},
    # Planned for a node of three GPUs.
    "launcher": {"name": "slurm"},
    "cluster": {"gpus": 3},
    "precision": {"name": "fp32"},
}
TILES = {"tiles": [1, 3], "directions": 2, "schedule": "gems"}
PIPELINE = {"stages": 3, "directions": 2, "microbatches": 2, "schedule": "gems_1f1b"}
OVERLAPS = ("off", "on")
"""Values of ``parallel.halo.overlap``."""


def nccl_posts(kind: str, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """Returns whether all that was sent arrived, and what was done; RunError: a rank crashed."""
    result: dict[str, Any] = run_ranks(_rank, 1, timeout_s, kind)
    library = "a stand-in"
    if kind == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        library = f"NCCL {'.'.join(map(str, version))}"
    what = (
        f"{library}: {result['messages']} messages on {result['channels']} communicators, "
        f"{STEPS} steps of a tile with parallel.halo.overlap={' and '.join(OVERLAPS)}"
    )
    return not result["wrong"], f"{what}; {', '.join(result['wrong']) or 'all bitwise equal'}"


def _rank(rank: int, kind: str) -> dict[str, Any]:
    comm.shutdown()  # the world over gloo that a benchmark's ranks begin with
    device, plans, wrong = open_device(kind, 0), [*map(_planned, OVERLAPS)], []
    with tempfile.TemporaryDirectory(prefix="hires-nccl-") as folder:
        _join("copies", Copies(), folder)
        expected = [_steps(config, plan, device) for config, plan in plans]
        comm.shutdown()
        library = dist if kind == "cuda" else Copies(late=True)
        backend = _join("echo", library, folder)
        if transport.staging("nccl").of([device.place(torch.ones(1))]) is not None:
            wrong.append("messages of the device go through the host")
        for (config, plan), before in zip(plans, expected, strict=True):
            tensors = _steps(config, plan, device)
            different = [name for name in before if not torch.equal(tensors[name], before[name])]
            if different:
                overlap = f"with overlap={plan.halo_overlap}"
                wrong.append(f"{len(different)} tensors differ {overlap}, as {different[0]}")
        pipeline = _plan(_config({"parallel": PIPELINE}))
        if number := run_pipeline(pipeline, device.torch):
            wrong.append(f"{number} numbers of the pipeline's messages are wrong")
        comm.shutdown()
    made = [len(channels(plan)) for plan in (*(plan for _, plan in plans), pipeline)]
    return {"wrong": wrong, "messages": backend.num_messages, "channels": sum(made)}


def _join(name: str, library: Any, folder: str) -> EchoBackend:
    # As the worker joins, with a backend that is registered.
    backend = EchoBackend(MIDDLE, library)

    def join(world: World, timeout_s: float) -> EchoBackend:
        backend.join(rendezvous.file_store(Path(folder) / name, 1), timeout_s, 1, 0)
        return backend

    BACKENDS.register(name)(join)
    REACHES[name] = (*REACHES["nccl"], "simulated")
    alone = World(0, 1, 0, 1, "127.0.0.1", 1, 0)
    comm.init([name], world=alone, timeout_s=TIMEOUT_S)
    # The routes of a plan name NCCL, in whose place this backend stands.
    transport.backends = {"nccl": backend}
    transport.world.handles["nccl"] = transport.world.handles.pop(name)
    transport.stagings["nccl"] = transport.staging(name)
    return backend


def _planned(overlap: str) -> tuple[RunConfig, Plan]:
    config = _config({"parallel": {**TILES, "halo": {"overlap": overlap}}})
    return config, _plan(config)


def _config(changes: Values) -> RunConfig:
    return from_dict({**BASE, **changes})


def _plan(config: RunConfig) -> Plan:
    plan = make_plan(config, trace_config(config))
    plan.require_ok()
    return plan


def _steps(config: RunConfig, plan: Plan, device: RankDevice) -> dict[str, Tensor]:
    """Returns the losses and parameters of the middle tile after some steps, on the host."""
    engine = build_rank(config, plan, MIDDLE, STEPS, device)
    kept: dict[str, Tensor] = {}
    try:
        feed = [iter(loader) for loader in engine.loaders]
        for step in range(STEPS):
            losses = engine.executor.step(feed, number=step).losses
            kept |= {f"loss {step}/{n}": to_host(loss).clone() for n, loss in losses.items()}
        device.synchronize()
        kept |= {name: to_host(tensor).clone() for name, tensor in engine.tensors.items()}
    finally:
        engine.close()
    return kept


@dataclass
class _Side:
    # One side of a message, with the number that all of its tensor holds in the end. The handle is
    # there once both sides are posted.
    tensor: Tensor
    number: float
    handle: comm.Handle | None = None


class _Mail:
    """The messages between the ranks of a plan, all of which are this process.

    A message is posted when both its sides have come to it, since one group call holds them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By channel, (source, target), and whether it sends: sides whose other side has not come.
        self._open: defaultdict[tuple[int, tuple[int, int], bool], deque[_Side]]
        self._open = defaultdict(deque)

    def post(self, event: Event, rank: int, number: float) -> _Side:
        """Returns a rank's side of a message."""
        sends = event.kind == "send"
        ends = (rank, event.peer) if sends else (event.peer, rank)
        dtype = getattr(torch, event.dtype)
        tensor = torch.full((math.prod(event.shape),), -1.0, dtype=dtype, device=self._device)
        side = _Side(tensor, number)
        if sends:
            tensor.add_(1).add_(number)  # still to be computed when the message is posted
        others = self._open[event.channel, ends, not sends]
        if not others:
            self._open[event.channel, ends, sends].append(side)
            return side
        pair = (others.popleft(), side) if sends else (side, others.popleft())
        for one, kind in zip(pair, ("recv", "send"), strict=True):
            one.handle = comm.post(kind, one.tensor, MIDDLE, event.tag, channel=event.channel)
        comm.end_call()
        return side


def run_pipeline(plan: Plan, device: torch.device) -> int:
    """Runs the messages of all ranks of a plan; returns how many numbers came out wrong.

    The ranks take turns: each runs until it waits for a message whose other side is not posted.
    RunError: all wait.
    """
    own = [Channel(one.what, ((MIDDLE, MIDDLE),) * len(one.pairs)) for one in channels(plan)]
    open_channels(own, {}, device)
    mail, wrong = _Mail(device), torch.zeros((), dtype=torch.int64, device=device)
    running = [_turns(plan, rank, mail, wrong) for rank in range(plan.world)]
    while running:
        passed = [next(rank, None) for rank in running]
        if not any(count != 0 for count in passed):
            raise RunError("the ranks of the pipeline wait for each other")
        running = [rank for rank, count in zip(running, passed, strict=True) if count is not None]
    return int(wrong)


def _turns(plan: Plan, rank: int, mail: _Mail, wrong: Tensor) -> Iterator[int]:
    # Yields the number of events since the last turn, where the rank has to wait for another one.
    posted: defaultdict[tuple[str, int, int], deque[_Side]] = defaultdict(deque)
    counts: Counter[tuple[str, int, int]] = Counter()
    passed = 0
    for event in events(plan, rank):
        key = (event.kind.removeprefix("wait_"), event.peer, event.tag)
        waited: list[_Side] = []
        if event.kind in POSTS:
            counts[key] += 1
            posted[key].append(mail.post(event, rank, 100.0 * event.tag + counts[key]))
        elif event.kind == "wait_sends":
            for sends in (posted[one] for one in posted if one[0] == "send"):
                waited += sends
                sends.clear()
        elif event.kind in WAITS:
            waited.append(posted[key].popleft())
        for side in waited:
            while side.handle is None:
                yield passed
                passed = 0
            side.handle.wait()
            wrong += (side.tensor != side.number).sum()
        passed += 1
    yield passed
