"""Chooses how a divided update exchanges gradients and parameters.

    broadcast   all-reduces of gradients, the owners broadcast what they have moved    3 (n - 1) b
    scatter     reduce-scatters of gradients, all-gathers of parameters                2 (n - 1) b

The fewer bytes decide, unless large gradients are summed while the backward pass runs: a
reduce-scatter begins behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hires.core.config.run_config import RunConfig
from hires.core.units import size
from hires.plan.event import BYTES
from hires.plan.gradient_sums import EARLY, sums_of
from hires.plan.groups import held_stages, num_holders
from hires.plan.ownership import owned_numbers, publications, shares_of_holders
from hires.plan.plan import Finding, Plan
from hires.plan.route_choice import BUCKETS, HOLDERS

AUTO, BROADCAST, SCATTER = "auto", "broadcast", "scatter"


class StepMessage(NamedTuple):
    """A collective of a stage's holders at the end of a step."""

    kind: str
    """``gradient`` or ``parameter``."""
    operation: str
    place: str
    dtype: str
    num_bytes: int
    """That each of them contributes."""
    sent_bytes: int
    """Of all of them together, at the least."""


def holders_messages(plan: Plan, stage: int, scatters: bool | None = None) -> Iterator[StepMessage]:
    """Yields what brings the gradients of a stage together, and what follows its update."""
    others = num_holders(plan, stage) - 1
    for one in sums_of(plan, stage, scatters):
        num_bytes = one.elements * BYTES[one.dtype]
        place = HOLDERS if one.alone or one.scatters else BUCKETS
        sent = (1 if one.scatters else 2) * others * num_bytes
        yield StepMessage("gradient", one.operation, place, one.dtype, num_bytes, sent)
    for update in publications(plan, stage, scatters):
        width = BYTES[update.dtype]
        facts = update.operation, HOLDERS, update.dtype, update.elements * width
        yield StepMessage("parameter", *facts, others * update.total * width)


def exchange_bytes(plan: Plan, scatters: bool) -> int:
    """Returns the bytes of one step in a way: sums of gradients, and parameters."""
    stages = (stage.index for stage in plan.stages if shares_of_holders(plan, stage.index))
    return sum(
        one.sent_bytes for stage in stages for one in holders_messages(plan, stage, scatters)
    )


def scatters_gradients(config: RunConfig, plan: Plan) -> bool:
    """Whether a plan, which is connected, scatters the gradients of a divided update."""
    wanted = config.optimizer.exchange
    fitting = plan.gradients != EARLY if wanted == AUTO else wanted == SCATTER
    return plan.shards_optimizer and plan.training and fitting


def exchange_notes(plan: Plan) -> list[Finding]:
    """Returns a note on what the division of the optimiser's state is worth, and on its bytes."""
    if not plan.shards_optimizer or not plan.training:
        return []
    apart = [stage.index for stage in plan.stages if not shares_of_holders(plan, stage.index)]
    if len(apart) == len(plan.stages):
        text = (
            "optimizer.shard=true divides nothing: each stage is held by one rank; leave it "
            "out, or use parallel.replicas, parallel.tiles or parallel.directions=2"
        )
        return [Finding("warning", "optimizer.shard", text)]
    most = max(owned_numbers(plan, rank) for rank in range(plan.world))
    held = (held_stages(plan, rank) for rank in range(plan.world))
    whole = max(sum(plan.stages[stage].params for stage in stages) for stages in held)
    moved = {way: size(exchange_bytes(plan, way)) for way in (False, True)}
    ways = ("all-reduces and broadcasts", "reduce-scatters and all-gathers")
    text = (
        f"a rank moves, and keeps the optimiser's state of, {most:,} of up to {whole:,} numbers; "
        f"gradients and parameters travel by {ways[plan.scatters]}, {moved[plan.scatters]} a step "
        f"of all ranks ({ways[not plan.scatters]}: {moved[not plan.scatters]})"
    )
    return [Finding("note", "optimizer.shard", text)]
