"""Lists the groups of ranks that call collectives together, each with its index.

A stage's ranks in one replica and direction share an image; all ranks that hold a stage sum its
gradients. Every rank lists the same groups in the same order, so that an index is enough to name
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from hires.plan.plan import Plan


def groups(plan: Plan) -> list[list[int]]:
    """Returns the ranks of every group, in the order in which all ranks create them.

    First the ranks of each (replica, direction, stage), then the gradient groups: all ranks of a
    stage, in both directions.
    """
    made = []
    for replica in range(plan.num_replicas):
        for direction in range(plan.num_directions):
            for stage in plan.stages:
                made.append(_members(plan, stage.index, [replica], [direction]))
    for stage in plan.stages:
        directions = range(plan.num_directions)
        made.append(_members(plan, stage.index, range(plan.num_replicas), directions))
    return made


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

    def make() -> int:
        return len(_members(plan, stage, range(plan.num_replicas), range(plan.num_directions)))

    return plan.remember(("holders", stage), make)


def _members(
    plan: Plan, stage: int, replicas: Iterable[int], directions: Iterable[int]
) -> list[int]:
    """Returns the ranks that hold a stage."""
    tiles = range(plan.stages[stage].num_ranks)
    held = {
        plan.rank_of(replica, direction, stage, tile)
        for replica in replicas
        for direction in directions
        for tile in tiles
    }
    return sorted(held)
