"""Lists the groups of ranks that call collectives together.

A stage's ranks in one replica and direction share an image; all ranks that hold a stage sum its
gradients (:mod:`hires.plan.updates`), where several sums are under way at once in several groups of
the same ranks, the lanes. Every rank lists the same groups in the same order, so an index names
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hires.core.codecs import CODECS, GRADIENT, HALO, JOIN, KINDS, PARAMETERS, STAGE
from hires.core.gradient_orders import is_free
from hires.plan.halos import ran_back
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import Plan, Stage, derived
from hires.plan.rules import TILED, WHOLE

ALONE_BYTES = 2**20
"""Gradients from this size on travel alone, without a copy."""


@derived
def groups(plan: Plan) -> list[list[int]]:
    """Returns the ranks of all groups in order: of each (replica, direction, stage), then stage.

    The holders of all stages follow once more for each lane but the first.
    """

    def members(stage: Stage, copies: Iterable[tuple[int, int]]) -> list[int]:
        ranks = range(stage.num_ranks)
        return sorted({plan.rank_of(*copy, stage.index, t) for copy in copies for t in ranks})

    copies = [*itertools.product(range(plan.num_replicas), range(plan.num_directions))]
    tiles = [members(stage, [copy]) for copy in copies for stage in plan.stages]
    return tiles + [members(stage, copies) for stage in plan.stages] * num_lanes(plan)


def process_groups(plan: Plan) -> list[list[int]]:
    """Returns the processes that execute the ranks of each group; without residents its ranks."""
    return [sorted({rank // plan.resident for rank in ranks}) for ranks in groups(plan)]


def tile_group(plan: Plan, rank: int, direction: int = 0) -> int:
    """Returns the index of the group of the ranks of a stage in one replica and direction."""
    replica, _, stage, _ = plan.slot_of(rank, direction)
    return (replica * plan.num_directions + direction) * len(plan.stages) + stage


def gradient_group(plan: Plan, stage: int, lane: int = 0) -> int:
    """Returns the index of the group of all ranks that hold a stage."""
    return (plan.num_replicas * plan.num_directions + lane) * len(plan.stages) + stage


def num_lanes(plan: Plan) -> int:
    """Returns the communicators on which a stage's gradients are summed."""
    return max(1, plan.outstanding) if plan.training and is_free(plan.gradients) else 1


def held_stages(plan: Plan, rank: int) -> list[int]:
    """Returns the stages that a rank holds, in order."""
    return sorted({slot.stage for slot in plan.slots_of(rank)})


def num_holders(plan: Plan, stage: int) -> int:
    """Returns how many ranks hold a stage."""
    return len(groups(plan)[gradient_group(plan, stage)])


AGREEMENT, NORM = "int64", "float64"
"""Types of the number with which all ranks agree, and of that with which they find the norm of all
gradients."""


def wide_dtype(dtype: str) -> str:
    """Returns the type in which ranks keep and sum parameters: single precision or better."""
    return "float64" if dtype == "float64" else "float32"


_CODED = {"gather": HALO, "crop": HALO, "parameter": PARAMETERS, **{kind: kind for kind in KINDS}}
"""Traffic -> the kind of message as codecs have it; other traffic has none."""


def codec_of(plan: Plan, traffic: str) -> str:
    """Returns what makes messages of some traffic smaller; empty: nothing."""
    return plan.codecs.get(_CODED.get(traffic, ""), "")


def sent_as(plan: Plan, value: str, traffic: str) -> tuple[str, str]:
    """Returns the type of a value on both sides of its messages, and their codec.

    Masks and indices travel as they are.
    """
    dtype = plan.dtype_of(value)
    codec = codec_of(plan, traffic) if "float" in dtype else ""
    return (wide_dtype(dtype) if codec else dtype), codec


def coded_error(plan: Plan) -> float:
    """Returns u sqrt(m) of codecs that change a number by u, in m messages on the longest way.

    Infinite: one of them has no bound.
    """
    moves = sum(op.moves_pixels for stage in plan.stages for op in stage.comm)
    crossed = len(plan.stages) - 1
    most = {HALO: moves, STAGE: crossed, JOIN: crossed, GRADIENT: 2, PARAMETERS: 1}
    units = [(CODECS[name].unit, most[kind]) for kind, name in plan.codecs.items()]
    return math.sqrt(sum(math.inf if unit is None else unit**2 * m for unit, m in units))


@derived
def trained(plan: Plan, stage: int) -> dict[str, list[str]]:
    """Returns the parameters to which a stage's backward pass comes, and the users of each."""
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
