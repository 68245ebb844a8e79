"""Trains one network over several communication settings in turns: `hires bench comm --train`.

    single      one process
    ddp         torch's DistributedDataParallel over gloo
    dp, sp      hires in two replicas, and in two tiles; each of them over
                  gloo, mpi    that backend alone
                  default      what runs take without a table of their own: memory of the machine
                               for small messages and sums, gloo for all others
                  mix          comm=mix, by the table of --table or the tuned one
                  coarse       the same with one backend for all sizes of an operation

All ranks hold all contestants at once. The first step of each is compared with one process.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from hires import comm
from hires.bench.bench_output import Result, Results
from hires.bench.contestants import (
    CLASSES,
    LEARNING_RATE,
    SINGLE,
    Contestant,
    model_config,
    with_twins,
)
from hires.bench.judge import Judge
from hires.bench.layouts_table import measured_rows
from hires.bench.runners import build
from hires.bench.started_ranks import TORCHRUN, stream_started_ranks
from hires.bench.sweep import StartOptions
from hires.bench.timing import race
from hires.comm.backends import rendezvous
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.ranks.world import World
from hires.engine import arithmetic
from hires.engine.device import open_device
from hires.nets.trace import trace_config
from hires.plan.message_routes import backends_of_plan, has_memory, joined_backends
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.route_choice import resolve

TRAIN = "hires.bench.comm_training:run_training"
NUM_RANKS = 2
WAIT_S = 120.0
DDP = "ddp on gloo"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"replicas": NUM_RANKS},
    "sp": {"tiles": [1, NUM_RANKS]},
}

log = logging.getLogger(__name__)


def train(
    options: StartOptions, model: str, image: int, batch: int, table: str, has_mpi: bool
) -> Results:
    """Yields the rows after each round; ``batch`` images a replica, ``table``: the way ``mix``."""
    rows = _contestants(options, model, image, batch, table, has_mpi)
    shown = {**dataclasses.asdict(options), "model": model, "image": [image, image], "batch": batch}
    spec = {
        "rows": [_plain(row) for row in rows],
        "rounds": options.rounds,
        "device": options.device,
    }
    how = (options.start, TRAIN, NUM_RANKS, options.timeout, spec)
    for measured in stream_started_ranks(*how, hosts=options.hosts):
        ok = all(row["ok"] for row in measured)
        yield {"ok": ok, "options": shown, "tasks": {"train": measured}}


def settings(table: str, has_mpi: bool) -> dict[str, dict[str, Any]]:
    """Returns the keys of ``comm`` of each setting."""
    alone = {"shared_memory": False}
    return {
        "gloo": {"backend": "gloo", **alone},
        **({"mpi": {"backend": "mpi", **alone}} if has_mpi else {}),
        "default": {"backend": "gloo"},
        "mix": {"backend": "gloo", "table": table or "tuned"},
        "coarse": {"backend": "gloo", "table": table or "tuned", "granularity": "coarse"},
    }


def _contestants(
    options: StartOptions, model: str, image: int, batch: int, table: str, has_mpi: bool
) -> list[Contestant]:
    launcher = {"name": "torchrun"}
    if options.start != TORCHRUN:
        launcher = {"name": "mpirun", "mpi": options.start}
    base = {
        "device": options.device,
        "image": [image, image],
        "batch": batch,
        "steps": 1,
        "model": dataclasses.asdict(model_config(model)),
        "data": {"classes": CLASSES, "prefetch": 0},
        "optimizer": {"lr": LEARNING_RATE},
        "measure": {"warmup": 0},
        "launcher": launcher,
    }
    single = resolve(from_dict(base))
    graph = trace_config(single)
    both = resolve(from_dict({**base, "batch": 2 * batch, "parallel": LAYOUTS["dp"]}))
    made = [
        Contestant(SINGLE, "one process", single, None, 1, "module"),
        Contestant(DDP, "DistributedDataParallel", both, None, NUM_RANKS, "ddp"),
    ]
    for layout, parallel in LAYOUTS.items():
        for name, keys in settings(table, has_mpi).items():
            images = batch * parallel.get("replicas", 1)
            values = {**base, "batch": images, "parallel": parallel, "comm": keys}
            config = resolve(from_dict(values))
            log.info("planning %s over %s", layout, name)
            plan = make_plan(config, graph)
            plan.require_ok()
            what = ", ".join(backends_of_plan(plan))
            peers = (DDP,) if layout == "dp" else ()
            more: dict[str, Any] = {"baseline": SINGLE, "peers": peers}
            made.append(Contestant(f"{layout} {name}", what, config, plan, NUM_RANKS, **more))
    return with_twins(made)


def run_training(world: World, spec: dict[str, Any]) -> Iterator[list[Result]]:
    """Yields the rows of ``spec``, whose values are plain, after each round, on a rank."""
    rows = [_row(values) for values in spec["rows"]]
    every = [*rows, *(row.twin for row in rows if row.twin is not None)]
    plans = [row.plan for row in every if row.plan is not None]
    device = open_device(spec["device"], world.local_rank)
    backends = [*dict.fromkeys(name for plan in plans for name in joined_backends(plan))]
    backends.sort(key=lambda name: name != "gloo")  # what names no route takes the first
    memory = any(map(has_memory, plans))
    comm.init(backends, world=world, timeout_s=WAIT_S, shared_memory=memory)
    rendezvous.torch_world(world, WAIT_S)
    arithmetic.prepare(rows[0].config, device, world.rank)
    group = comm.make_groups([[*range(world.size)]])[0]
    judge = Judge(world.rank, device)
    runners, deviations = {}, {}
    for row in rows:
        runners[row.name] = build(row, world.rank, device)
        deviations[row.name] = judge.judge(row, runners[row.name])
    del judge
    for samples in race(runners, spec["rounds"], 1, group):
        yield measured_rows(rows, samples, deviations)
    comm.barrier()
    comm.shutdown()


def _plain(row: Contestant) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    plan = row.plan.to_dict() if row.plan is not None else None
    twin = _plain(row.twin) if row.twin is not None else None
    return {**values, "config": to_dict(row.config), "plan": plan, "twin": twin}


def _row(values: dict[str, Any]) -> Contestant:
    plan = Plan.from_dict(values["plan"]) if values["plan"] is not None else None
    config: RunConfig = from_dict(values["config"])
    twin = _row(values["twin"]) if values["twin"] is not None else None
    return Contestant(**{**values, "config": config, "plan": plan, "twin": twin})
