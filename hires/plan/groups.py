"""Lists the groups of ranks that call collectives together, and the sums of their gradients.

A stage's ranks in one replica and direction share an image; all ranks that hold a stage sum its
gradients. Every rank lists the same groups in the same order, so an index names one.

The loss of a microbatch is divided by the number of microbatches of all replicas, so one sum makes
a stage's gradients: summed over tiles, averaged over the rest. The same messages bring the running
statistics of several copies together. Three ways, chosen when the plan is made:

    together  ranks of one machine read each other's memory: one message holds everything (where
              the system forbids that, ``comm.all_reduce_coalesced`` divides it: the same bytes)
    early     large gradients set out alone, as soon as the last backward pass has made them
    late      large gradients set out alone, one after the other, when all passes are done

Early sums need cores for the threads of the transport; elsewhere they slow the pass down. In two
directions the last pass completes the gradients of one of two stages only, so nothing is early.

    early:   ... B3 of conv9 | issue conv9 | B3 of conv8 | ... | small ones | wait conv9 ...
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import NamedTuple

from hires.core.config.run_config import RunConfig
from hires.plan.event import BYTES
from hires.plan.halos import ran_back
from hires.plan.hardware import NCCL, backend_of
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import Plan, Stage, derived
from hires.plan.rules import TILED, WHOLE

TOGETHER, EARLY, LATE = "together", "early", "late"
ALONE_BYTES = 2**20
"""Gradients from this size on travel alone, without a copy."""


@derived
def groups(plan: Plan) -> list[list[int]]:
    """Returns the ranks of every group, in the order in which all ranks create them.

    First those of each (replica, direction, stage), then for gradients all ranks of each stage.
    """

    def members(stage: Stage, copies: Iterable[tuple[int, int]]) -> list[int]:
        ranks = range(stage.num_ranks)
        return sorted({plan.rank_of(*copy, stage.index, t) for copy in copies for t in ranks})

    copies = [*itertools.product(range(plan.num_replicas), range(plan.num_directions))]
    tiles = [members(stage, [copy]) for copy in copies for stage in plan.stages]
    return tiles + [members(stage, copies) for stage in plan.stages]


def num_tile_groups(plan: Plan) -> int:
    """Returns how many groups hold the tiles or shards of one stage; they come first."""
    return plan.num_replicas * plan.num_directions * len(plan.stages)


def tile_group(plan: Plan, rank: int, direction: int = 0) -> int:
    """Returns the index of the group of the ranks of a stage in one replica and direction."""
    replica, _, stage, _ = plan.slot_of(rank, direction)
    return (replica * plan.num_directions + direction) * len(plan.stages) + stage


def gradient_group(plan: Plan, stage: int) -> int:
    """Returns the index of the group of all ranks that hold a stage."""
    return num_tile_groups(plan) + stage


def held_stages(plan: Plan, rank: int) -> list[int]:
    """Returns the stages that a rank holds, in order."""
    return sorted({slot.stage for slot in plan.slots_of(rank)})


def num_holders(plan: Plan, stage: int) -> int:
    """Returns how many ranks hold a stage."""
    return len(groups(plan)[gradient_group(plan, stage)])


class GradientSum(NamedTuple):
    """One message of gradients: the sum of some tensors over all holders of a stage."""

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    """Running statistics whose terms of this step are summed along."""
    elements: int
    dtype: str
    alone: bool
    """Whether it is one large gradient, whose sum is begun and waited for apart."""
    node: str = ""
    """The node whose backward pass makes it; empty: it sets out when all passes are done."""


class Agreement(NamedTuple):
    """The message of every rank when all ranks agree on one number."""

    shape: tuple[int, ...] = (1,)
    dtype: str = "int64"


AGREEMENT = Agreement()


def gradient_mode(config: RunConfig, world: int) -> str:
    """Returns how a run sums its gradients: ``together``, ``early`` or ``late``."""
    launcher = config.launcher
    if backend_of(config) == NCCL:  # sums run beside the pass, on streams of their own
        return EARLY
    if config.comm.shared_memory and launcher.num_nodes == 1:
        return TOGETHER
    cores = config.cluster.cores
    if launcher.is_here and hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    ranks = -(-world // launcher.num_nodes)
    return EARLY if cores is not None and cores > ranks * launcher.threads else LATE


def wide_dtype(plan: Plan) -> str:
    """Returns the type in which ranks sum numbers: single precision or better."""
    return "float64" if plan.dtype == "float64" else "float32"


def gradient_dtype(plan: Plan) -> str:
    """Returns the type in which gradients of parameters are summed."""
    return plan.message_dtype or wide_dtype(plan)


def trained(plan: Plan, stage: int) -> dict[str, list[str]]:
    """Returns the parameters to which the backward pass of a stage comes, and the users of each.

    As in torch, other parameters get no gradient.
    """
    reached = ran_back(plan.graph, plan.stages[stage])
    users: dict[str, list[str]] = {}
    for node in plan.nodes(stage):
        for name in node.params:
            if plan.graph.params[name].trainable:
                users.setdefault(name, []).append(node.name)
    return {name: nodes for name, nodes in users.items() if not reached.isdisjoint(nodes)}


@derived
def used_both_ways(plan: Plan, stage: Stage) -> set[str]:
    """Returns the parameters that tiles use for their pixels and for values of the whole image.

    The gradient of the one use is a part on each tile, that of the other complete on each.
    """
    users: dict[str, set[str]] = {TILED: set(), WHOLE: set()}
    for node in plan.nodes(stage.index) if stage.num_tiles > 1 else ():
        users[stage.layout[node.name]].update(node.params)
    return users[TILED] & users[WHOLE]


def running_decays(plan: Plan, stage: int) -> dict[str, float]:
    """Returns the running statistics that a stage updates, and what a microbatch leaves of each."""
    decays: dict[str, float] = {}
    for node in plan.nodes(stage):
        if updates_statistics(node):
            for key in ("running_mean", "running_var"):
                name = node.args[key]["param"]
                decays[name] = decays.get(name, 1.0) * (1 - node.args["momentum"])
    return decays


def sums_of(plan: Plan, stage: int) -> list[GradientSum]:
    """Returns the messages in which a stage's gradients are summed, in the order of issue."""
    return _sums(plan, stage, plan.gradients)


@derived
def _sums(plan: Plan, stage: int, mode: str) -> list[GradientSum]:
    if not plan.training or num_holders(plan, stage) == 1:
        return []
    params, users = plan.graph.params, trained(plan, stage)
    dtype, wide = gradient_dtype(plan), wide_dtype(plan)
    least = ALONE_BYTES // BYTES[dtype]
    # The backward pass makes the last layer's gradients first.
    large = [name for name in reversed(users) if params[name].num_elements >= least]
    alone = [] if mode == TOGETHER else large
    early = mode == EARLY and plan.num_directions == 1
    sums = []
    for name in alone:
        # Complete at the first of its nodes: with several, others may precede that one.
        node = users[name][0] if early and len(users[name]) == 1 else ""
        sums.append(GradientSum((name,), (), params[name].num_elements, dtype, True, node))
    sums.sort(key=lambda one: not one.node)
    rest = [name for name in large if name not in alone]
    rest += [name for name in users if name not in large]
    several = plan.num_replicas * plan.num_directions > 1
    statistics = [*running_decays(plan, stage)] if several else []
    # Statistics travel with the gradients, unless these are rounded to a type that a key names.
    learned, counted = tuple(rest), tuple(statistics)
    apart = [(learned, (), dtype), ((), counted, wide)]
    for names, terms, of_type in [(learned, counted, dtype)] if dtype == wide else apart:
        if elements := sum(params[name].num_elements for name in names + terms):
            sums.append(GradientSum(names, terms, elements, of_type, False))
    return sums
