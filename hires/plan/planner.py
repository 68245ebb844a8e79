"""Turns a config into a plan, each decision once: cut, tile, schedule, connect, prove."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.plan.checks import (
    check_cuts,
    check_directions,
    check_numbers,
    check_output,
    check_shared,
    check_ties,
)
from hires.plan.event import BYTES
from hires.plan.graph import Graph
from hires.plan.groups import gradient_mode, held_stages, num_holders, sums_of
from hires.plan.layout import add_loss, edges_of, lay_out, look_over, small_tiles
from hires.plan.partition import add_segments, layer_starts, partition
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.program import edge_messages, pass_comm
from hires.plan.proof.prove import verify
from hires.plan.schedule import SCHEDULES, forward_only

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


def make_plan(config: RunConfig, graph: Graph, known: Sequence[Finding] = ()) -> Plan:
    """Returns the plan of a run; what forbids to start it is in ``plan.findings``.

    Args:
        config: the run.
        graph: the network of ``config``, traced for one microbatch.
        known: findings about the layout that others made; with an error nothing is connected or
            proved, which takes long for thousands of ranks.
    """
    plan = Plan(
        graph=graph,
        stages=[Stage(0, 0, len(graph.nodes), [1, 1], 0)],
        edges=[],
        num_replicas=config.parallel.replicas,
        num_microbatches=config.parallel.microbatches,
        training=config.task.name == "train",
        dtype=DTYPES[config.precision.name],
        schedule=[[]],
        halo_overlap=config.parallel.halo.overlap,
        backend=config.comm.backend,
        gradients=gradient_mode(config, config.parallel.num_ranks),
        num_directions=config.parallel.directions,
        num_pairs=config.parallel.pairs,
        findings=[
            *check_numbers(config),
            *check_output(config, graph),
        ],
    )
    possible = plan.ok and all(finding.severity != "error" for finding in known)
    uncut = check_cuts(config.parallel, graph)
    plan.findings += [*(uncut or _divide(config, plan, possible)), *known]
    if plan.ok:
        _connect(config, plan)
    return plan


def _divide(config: RunConfig, plan: Plan, possible: bool) -> list[Finding]:
    """Lays the network out on stages and tiles; the plan keeps them if they are possible so far."""
    stages = _stages(config, plan.graph)
    if possible:
        plan.stages = stages
        plan.schedule = _schedule(config, plan)
        laid = check_directions(plan)
        laid += lay_out(plan.graph, stages, config.parallel.halo.fuse, config.parallel.listed)
    else:
        laid = look_over(plan.graph, stages, config.parallel.listed)
    return [
        *laid,
        *check_ties(plan.graph, stages, plan.training),
        *check_shared(plan.graph, stages, plan.training),
    ]


def _connect(config: RunConfig, plan: Plan) -> None:
    """Adds the messages, and proves that they cannot block each other."""
    if plan.training:
        add_loss(plan.graph, plan.stages[-1])
    add_segments(plan, config.memory.checkpoint)
    plan.edges = edges_of(plan.graph, plan.stages, plan.training)
    plan.findings += small_tiles(plan.graph, plan.stages, config.parallel.listed)
    plan.findings += verify(plan)
    plan.totals = totals(plan)


def totals(plan: Plan) -> dict[str, Any]:
    """Returns messages and bytes of one step of the whole world, in all and by kind.

    A collective of n ranks counts as n messages; an all-reduce of b bytes as 2 (n - 1) b bytes,
    the least that any algorithm sends.
    """
    by_kind: dict[str, dict[str, int]] = {}

    def add(kind: str, messages: int, num_bytes: int) -> None:
        entry = by_kind.setdefault(kind, {"messages": 0, "bytes": 0})
        entry["messages"] += messages * plan.num_replicas
        entry["bytes"] += num_bytes * plan.num_replicas

    for rank in range(plan.ranks_per_replica):
        _count_rank(plan, rank, add)
    return {
        "messages": sum(entry["messages"] for entry in by_kind.values()),
        "bytes": sum(entry["bytes"] for entry in by_kind.values()),
        "by_kind": by_kind,
    }


def _count_rank(plan: Plan, rank: int, add: Any) -> None:
    """Adds what one rank sends in one step; sums travel in single precision or better."""
    size = BYTES[plan.dtype]
    wide = max(size, BYTES["float32"])
    alike: dict[tuple[str, int], list[str]] = {}  # passes that differ in their microbatch only
    for action in plan.actions_of(rank):
        alike.setdefault((action[0], plan.direction_of(action)), []).append(action)
    for (letter, direction), actions in alike.items():
        stage, times = plan.stages[plan.slot_of(rank, direction).stage], len(actions)
        for message in edge_messages(plan, rank, actions[0], outgoing=True):
            peer = plan.slot_of(message.peer, direction)
            kind = "stage" if plan.stages[peer.stage].num_ranks == stage.num_ranks else "join"
            add(kind, times, times * math.prod(message.shape) * size)
        for op, _ in pass_comm(plan, stage, letter == "B"):
            if op.kind == "halo":
                # All tiles of a stage do the same passes: the first one counts for all of them.
                if plan.slot_of(rank, direction).tile == 0 and op.messages:
                    each = math.prod(plan.graph.shape(op.value)[:2]) * size
                    pixels = sum((r1 - r0) * (c1 - c0) for _, _, r0, r1, c0, c1 in op.messages)
                    add("halo", times * len(op.messages), times * pixels * each)
            else:
                # A gather: every rank hands what it has to all others of the stage.
                add(op.kind, times, times * (stage.num_ranks - 1) * op.elements * wide)
    for index in held_stages(plan, rank):
        holders = num_holders(plan, index)
        for one in sums_of(plan, index):
            add("gradient", 1, int(2 * (holders - 1) / holders * one.elements * wide))


def _stages(config: RunConfig, graph: Graph) -> list[Stage]:
    """Returns the stages: where the network is cut, what is tiled, and the ranks of each."""
    parallel = config.parallel
    grids, shards = parallel.grids, parallel.shards
    num_ranks = [rows * cols * parts for (rows, cols), parts in zip(grids, shards, strict=True)]
    bounds = partition(graph, num_ranks, parallel.balance)
    starts = set(layer_starts(graph))
    stages: list[Stage] = []
    rank = 0
    for index, tiles in enumerate(grids):
        nodes = graph.nodes[bounds[index] : bounds[index + 1]]
        names = {name for node in nodes for name in node.params}
        stage = Stage(index, bounds[index], bounds[index + 1], tiles, rank, shards[index])
        stage.num_layers = len(starts & set(range(stage.first, stage.last)))
        stage.first_layer, stage.last_layer = nodes[0].name, nodes[-1].name
        stage.flops = sum(node.flops for node in nodes)
        stage.params = sum(
            graph.params[name].num_elements for name in names if graph.params[name].trainable
        )
        stages.append(stage)
        rank += stage.num_ranks
    return stages


def _schedule(config: RunConfig, plan: Plan) -> list[list[str]]:
    make = SCHEDULES[config.parallel.schedule] if plan.training else forward_only
    return make(plan.pipeline)
