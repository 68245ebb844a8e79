"""Estimates how long a rank computes: seconds of every node in a pass, measured or modelled."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hires.plan.event import ALONE, BARRIER, BYTES, MEETING, PASS, UPDATE, Event
from hires.plan.groups import held_stages
from hires.plan.halos import BORDER_SHARE, extents_of
from hires.plan.layout import shares_of
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import CommOp, Plan, Slot, Stage, derived
from hires.plan.program import steps_of
from hires.plan.simulation.node_work import NodeWork, node_work
from hires.plan.tiling import area

if TYPE_CHECKING:
    from hires.plan.simulation.machine_calibration import CalibratedDevice
from hires.plan.updates import updated_elements

BACK = 2
"""Operations of a backward pass for one of the forward pass: the gradients of input and weight."""
ADD_TOUCHES = 3
"""Numbers that a microbatch after the first reads or writes for each parameter, to add its gradient
to that of those before: both gradients, and their sum."""
UPDATE_TOUCHES = 3
"""Numbers that an update reads or writes for each parameter: itself twice, and its gradient. Each
number that the optimiser keeps is read and written, too."""


@dataclass(frozen=True)
class Device:
    """A device that is either bound by its arithmetic or by its memory.

    Source:
        Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
        multicore architectures", CACM 2009.
    """

    flops_per_s: float
    """That its convolutions reach, not what its data sheet says."""
    bytes_per_s: float
    launch_s: float

    def seconds(self, work: NodeWork) -> float:
        """Returns the seconds of a pass over a node."""
        busy_s = max(work.flops / self.flops_per_s, work.num_bytes / self.bytes_per_s)
        return (BACK if work.back else 1) * max(busy_s, self.launch_s)

    def update_s(self, num_bytes: float) -> float:
        """Returns the seconds in which the memory is read and written."""
        return num_bytes / self.bytes_per_s

    memory_s = update_s

    def besides_s(self, num_passes: int) -> float:
        """Returns 0: all of a step belongs to nodes and the update."""
        return 0.0


DeviceSpeed: TypeAlias = "Device | CalibratedDevice"


@dataclass
class Roofline:
    """Estimated seconds of every node on a device."""

    plan: Plan
    device: DeviceSpeed

    def steps_s(self, rank: int, action: str) -> list[float]:
        """Returns the seconds of each step of an action."""
        plan = self.plan
        slot = plan.slot_of(rank, plan.direction_of(action))
        stage, back = plan.stages[slot.stage], action[0] == "B"
        return _modelled(plan, self.device, stage, slot.tile, back)

    def optimiser_s(self, rank: int) -> float:
        """Returns the seconds of an update, and of what a step has besides its nodes."""
        besides_s = self.device.besides_s(len(self.plan.actions_of(rank)))
        if not self.plan.training:
            return besides_s
        numbers = sum(self.plan.stages[index].params for index in held_stages(self.plan, rank))
        moved = updated_elements(self.plan, rank) if self.plan.shards_optimizer else numbers
        touches = UPDATE_TOUCHES + 2 * self.plan.optimizer_states
        return self.device.update_s(touches * moved * BYTES["float32"]) + besides_s


@derived
def works_of(plan: Plan, stage: Stage, tile: int, back: bool) -> list[NodeWork | None]:
    """Returns what each step of a pass asks of the rank of a tile; None: nothing."""

    def share(value: str) -> float:
        return shares_of(plan, stage, value)[tile]

    work_of = functools.partial(node_work, dtype=plan.dtype, training=plan.training)
    joint = "halo", "norm"
    return [
        work_of(plan.graph, node, share, back=again, shared=any(op.kind in joint for op in comm))
        for node, again, comm in steps_of(plan, stage, back)
    ]


@derived
def _modelled(plan: Plan, device: DeviceSpeed, stage: Stage, tile: int, back: bool) -> list[float]:
    # Gradients are added up in the mean over microbatches.
    touches = ADD_TOUCHES * BYTES["float32"]
    others = 1 - 1 / (plan.num_microbatches * plan.num_pairs)
    seconds = []
    works = works_of(plan, stage, tile, back)
    for step, work in zip(steps_of(plan, stage, back), works, strict=True):
        params = (plan.graph.params[name] for name in step.node.params)
        learned = sum(param.num_elements for param in params if param.trainable)
        added_s = device.memory_s(touches * learned * others) if back else 0.0
        seconds.append((device.seconds(work) if work else 0.0) + added_s)
    return seconds


SUMS = ("issue", "wait_issued")
COMPUTES = Event("forward", -1, 0)
"""Computation of a pass or an update, or a part of it."""


class Item(NamedTuple):
    """One thing that takes a rank's time."""

    action: str
    """That it belongs to; empty at the end of the step."""
    event: Event = COMPUTES
    seconds: float = 0.0


def timed_program(plan: Plan, rank: int, costs: Roofline, own: Iterable[Event]) -> list[Item]:
    """Returns what takes time of a rank's own events of a step, which all begin together."""
    items: list[Item] = []
    stream = iter(own)
    for event in stream:
        action = event.part.action
        if event.computes == PASS:
            body = [*itertools.takewhile(lambda e: e.role != ALONE, stream)]
            seconds = costs.steps_s(rank, action)
            items += _pass(plan, rank, action, [e for e in body if e.part.node], seconds)
            items += [Item(action, e) for e in body if not e.part.node]
        elif event.computes == UPDATE:
            items.append(Item("", COMPUTES, costs.optimiser_s(rank)))
        elif event.role != ALONE and event.traffic != BARRIER:
            items.append(Item(action, event))
    return items


def _pass(
    plan: Plan, rank: int, action: str, inner: list[Event], seconds: list[float]
) -> list[Item]:
    """Returns what a rank does in one pass.

    A halo is exchanged before its node, everything else after the node that made it necessary.
    Where halos overlap with computation, what needs no borrowed pixels is computed while they
    travel.
    """
    slot = plan.slot_of(rank, plan.direction_of(action))
    stage, back = plan.stages[slot.stage], action[0] == "B"
    left = deque(inner)
    items: list[Item] = []

    def compute(step_s: float) -> None:
        """Adds computation to the piece before, if there is one."""
        if items and items[-1].event is COMPUTES:
            step_s += items.pop().seconds
        items.append(Item(action, COMPUTES, step_s))

    for step, step_s in zip(steps_of(plan, stage, back), seconds, strict=True):
        here = []
        while left and left[0].part.node == step.node.name and left[0].part.back == step.back:
            here.append(left.popleft())
        waited = {e.part.number for e in here if e.role in ("wait_recv", "wait_send")}
        shares = [_hidden_share(plan, slot, stage.comm[index]) for index in sorted(waited)]
        hidden_s = step_s * min(shares, default=0.0)
        left_s = step_s
        if step.back or not waited:  # only the halo of a forward pass precedes its node
            compute(step_s - hidden_s)
            left_s = hidden_s
        for event in here:
            if event.role.startswith("wait") and hidden_s:
                compute(hidden_s)
                left_s, hidden_s = left_s - hidden_s, 0.0
            if event.role in (MEETING, *SUMS) and left_s:
                compute(left_s)
                left_s = 0.0
            items.append(Item(action, event))
        if left_s:
            compute(left_s)
    assert not left, f"{left[0].what} is not among the steps of {action}"
    return items


def _hidden_share(plan: Plan, slot: Slot, op: CommOp) -> float:
    """Returns the share of a node, a convolution, that is computed while its halo travels."""
    window = facts_of(plan.graph.by_name[op.node].kind).window
    if op.kind != "halo" or plan.halo_overlap == "off" or window is None or not window.strips:
        return 0.0
    own = area(extents_of(plan.graph, plan.stages[slot.stage], op.value)[slot.tile])
    rects = (one.box.rect for one in op.messages if one.target == slot.tile)
    borrowed = sum(area(rect) for rect in rects if rect is not None)
    border = borrowed / own if own else 1.0
    if plan.halo_overlap == "auto" and border > BORDER_SHARE:
        return 0.0
    return max(0.0, 1 - border)
