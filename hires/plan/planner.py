"""How does a config become a plan? Each decision once, in this order: divide, cut, tile, schedule, prove."""

from __future__ import annotations

import math
from typing import Any

from hires.core.config import RunConfig
from hires.plan.graph import Graph
from hires.plan.messages import add_loss, edges_of, lay_out, small_tiles
from hires.plan.partition import layer_starts, partition
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.program import BYTES, edge_messages, gradient_group, groups, halo_messages
from hires.plan.schedule import SCHEDULES, forward_only
from hires.plan.verify import verify

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


def make_plan(config: RunConfig, graph: Graph) -> Plan:
    """Returns the plan of a run; what forbids to start it is in ``plan.findings``.

    Args:
        config: the run.
        graph: the network of ``config``, traced for one microbatch.
    """
    findings = _check_degrees(config, graph)
    plan = Plan(
        graph=graph,
        stages=[Stage(0, 0, len(graph.nodes), [1, 1], 0)],
        edges=[],
        num_replicas=config.parallel.replicas,
        num_microbatches=config.parallel.microbatches,
        training=config.task.name == "train",
        dtype=DTYPES[config.precision.name],
        schedule=[[]],
        findings=findings,
    )
    if plan.ok:
        plan.stages = _stages(config, graph)
        plan.schedule = _schedule(config)
        plan.findings += lay_out(graph, plan.stages)
        plan.findings += _check_ties(plan)
        plan.findings += _check_loss(plan)
    if plan.ok:
        if plan.training:
            add_loss(graph, plan.stages[-1])
        plan.edges = edges_of(graph, plan.stages, plan.training)
        plan.findings += small_tiles(graph, plan.stages)
        plan.findings += verify(plan)
        plan.totals = totals(plan)
    return plan


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
    """Adds what one rank sends in one step."""
    size = BYTES[plan.dtype]
    stage = plan.stages[plan.slot_of(rank)[1]]
    for action in plan.schedule[stage.index]:
        for message in edge_messages(plan, rank, action, outgoing=True):
            peer_tiles = plan.stages[plan.slot_of(message.peer)[1]].num_tiles
            kind = "stage" if peer_tiles == stage.num_tiles else "join"
            add(kind, 1, math.prod(message.shape) * size)
        back = action[0] == "B"
        for op in stage.comm:
            if op.kind == "halo" and (op.back or not back):
                for message in halo_messages(plan, rank, op, back)[0]:
                    add("halo", 1, math.prod(message.shape) * size)
            elif op.kind != "halo" and (op.back if back else op.kind != "share"):
                share = 2 * (stage.num_tiles - 1) / stage.num_tiles
                add(op.kind, 1, int(share * op.elements * 4))
    members = len(groups(plan)[gradient_group(plan, rank)])
    if plan.training and members > 1:
        add("gradient", 1, int(2 * (members - 1) / members * stage.params * 4))


def _check_degrees(config: RunConfig, graph: Graph) -> list[Finding]:
    """Returns what is wrong with the numbers before any cut is made."""
    findings = []
    parallel = config.parallel
    pieces = parallel.replicas * parallel.microbatches
    if config.batch % pieces:
        below = config.batch // pieces * pieces
        near = f"batch={below or pieces} or batch={below + pieces}" if below else f"batch={pieces}"
        findings.append(
            Finding(
                "error",
                "batch",
                f"batch={config.batch} does not divide into {parallel.replicas} replicas of "
                f"{parallel.microbatches} microbatches; use {near}, or parallel.microbatches="
                f"{_divisor(config.batch, parallel.replicas, parallel.microbatches)}",
            )
        )
    layers = len(layer_starts(graph))
    if parallel.stages > layers:
        findings.append(
            Finding(
                "error",
                "parallel.stages",
                f"parallel.stages={parallel.stages} is more than the {layers} layers of the "
                f"network; use parallel.stages={layers} or fewer",
            )
        )
    if parallel.balance is not None and sum(parallel.balance) != layers:
        findings.append(
            Finding(
                "error",
                "parallel.balance",
                f"parallel.balance={parallel.balance} sums to {sum(parallel.balance)}, but the "
                f"network has {layers} layers; the numbers must sum to {layers}",
            )
        )
    for name, length, parts in zip(
        ("rows", "columns"), (config.height, config.width), parallel.tiles, strict=True
    ):
        if parts > length:
            findings.append(
                Finding(
                    "error",
                    "parallel.tiles",
                    f"parallel.tiles={parallel.tiles} cuts {length} {name} of the image into "
                    f"{parts} tiles; use at most {length}, or a larger image",
                )
            )
    return findings


def _divisor(batch: int, replicas: int, microbatches: int) -> int:
    """Returns the largest number of microbatches up to the wanted one that divides the batch."""
    share = batch // replicas if batch % replicas == 0 else 1
    return max(m for m in range(1, microbatches + 1) if share % m == 0) if share else 1


def _stages(config: RunConfig, graph: Graph) -> list[Stage]:
    """Returns the stages: where the network is cut, what is tiled, and the ranks of each."""
    parallel = config.parallel
    bounds = partition(graph, parallel.stages, parallel.balance)
    starts = set(layer_starts(graph))
    stages: list[Stage] = []
    rank = 0
    for index in range(parallel.stages):
        nodes = graph.nodes[bounds[index] : bounds[index + 1]]
        tiles = list(parallel.tiles) if index < parallel.spatial_stages else [1, 1]
        names = {name for node in nodes for name in node.params}
        stage = Stage(index, bounds[index], bounds[index + 1], tiles, rank)
        stage.num_layers = len(starts & set(range(stage.first, stage.last)))
        stage.first_layer, stage.last_layer = nodes[0].name, nodes[-1].name
        stage.flops = sum(node.flops for node in nodes)
        stage.params = sum(
            graph.params[name].num_elements for name in names if graph.params[name].trainable
        )
        stages.append(stage)
        rank += stage.num_tiles
    return stages


def _schedule(config: RunConfig) -> list[list[str]]:
    """Returns the order of every stage's actions."""
    stages, microbatches = config.parallel.stages, config.parallel.microbatches
    if config.task.name == "infer":
        return forward_only(stages, microbatches)
    return SCHEDULES[config.parallel.schedule](stages, microbatches)


def _check_ties(plan: Plan) -> list[Finding]:
    """Returns an error for every parameter that two stages use."""
    holders: dict[str, int] = {}
    findings = []
    for stage in plan.stages:
        for name in {name for node in plan.nodes(stage.index) for name in node.params}:
            first = holders.setdefault(name, stage.index)
            if first != stage.index:
                text = f"{name} is used by stages {first} and {stage.index}; cut so that one has both"
                findings.append(Finding("error", "parallel.balance", text))
    return findings


def _check_loss(plan: Plan) -> list[Finding]:
    """Returns an error if the output is nothing that a classifier's loss can take."""
    shape = plan.graph.shape(plan.graph.output)
    if not plan.training or len(shape) in (2, 4):
        return []
    text = (
        f"the network returns {shape}; training needs (n, classes), or (n, classes, rows, columns) "
        f"with the image's class for every pixel"
    )
    return [Finding("error", "model", text)]
