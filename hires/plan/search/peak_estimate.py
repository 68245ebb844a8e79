"""Estimates the memory of the fullest rank of a layout from its stages and its schedule.

action     F0   F1   B0   B1        bytes of a rank: its weights
in flight  1    2    1    0                          + in flight x held
moment          ^                                    + again + beside, of the stage at work
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of a microbatch on a rank."""

    stage: int
    microbatch: int
    back: bool


class StageBytes(NamedTuple):
    """What a rank of a stage holds, in bytes."""

    weights: float
    """With gradients and the optimiser's numbers."""
    held: float
    """Of each microbatch in flight."""
    again: float
    """That a backward pass computes once more."""
    beside: float
    """Of the largest node while it is computed, with what it reads."""


def fullest_bytes(
    program: Sequence[Sequence[Pass]],
    places: Sequence[Sequence[int]],
    stages: Sequence[StageBytes],
    training: bool,
) -> float:
    """Returns the bytes of the fullest rank.

    Args:
        program: the passes of every rank in order.
        places: the stage of every rank, for each direction.
        stages: what each stage holds.
        training: whether microbatches are in flight until their backward pass.
    """
    alike: set[tuple[int, ...]] = set()
    fullest = 0.0
    for rank, actions in enumerate(program):
        of_rank = tuple(places_of[rank] for places_of in places)
        if of_rank in alike:
            continue  # ranks of the same stages do the same
        alike.add(of_rank)
        weights = sum(stages[stage].weights for stage in set(of_rank))
        fullest = max(fullest, weights + _most_in_flight(actions, stages, training))
    return fullest


def _most_in_flight(actions: Sequence[Pass], stages: Sequence[StageBytes], training: bool) -> float:
    """Returns the most bytes of activations that the passes of a rank have at a moment."""
    in_flight: dict[int, int] = {}
    most = 0.0
    for stage, _, back in actions:
        in_flight[stage] = in_flight.get(stage, 0) + (-1 if back else 1) if training else 0
        held = sum(count * stages[one].held for one, count in in_flight.items())
        most = max(most, held + stages[stage].again + stages[stage].beside)
    return most
