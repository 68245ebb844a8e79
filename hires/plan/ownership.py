"""Divides the update of a stage's parameters among the ranks that hold it.

With ``optimizer.shard`` each of n holders keeps the optimiser's state of about 1/n of the
elements, updates those, and sends them to the others, in one of two ways:

    broadcast   holder 0   sums all        | updates conv1        | sends conv1     receives
                holder 1   sums all        | updates conv2, fc 0-9| receives        sends conv2, ...

    scatter     holder 0   sums of conv1   | updates conv1        | gathers what both have updated
                holder 1   sums of conv2.. | updates conv2, fc 0-9| gathers what both have updated

Of b bytes of gradients and as many of parameters, n ranks send 3 (n - 1) b in the first way and
2 (n - 1) b in the second. Both have the same shares.

A share is a run of whole rows of the parameters (along their first dim) in the order of the
network. It begins at a multiple of ``UNIT`` elements of its parameter, where a kernel with vectors
computes the same bits as over all of it.

Source:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    2020, stage 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hires.core.codecs import codec_named
from hires.core.units import size
from hires.plan.graph import Parameter
from hires.plan.groups import (
    codec_of,
    gradient_group,
    groups,
    held_stages,
    trained,
    wide_dtype,
)
from hires.plan.plan import Finding, Plan, derived

UNIT = 64
PUBLISH, REDUCE_SCATTER, ALL_GATHER = "publish", "reduce_scatter", "all_gather"
"""Kinds of events of a divided update."""


class Rows(NamedTuple):
    """Rows of a parameter."""

    name: str
    first: int
    last: int
    """After the last one."""
    elements: int


class Publication(NamedTuple):
    """The message in which holders of a stage send what they have updated to the others."""

    owner: int
    """As a rank; -1: each sends its own part."""
    parts: tuple[Rows, ...]
    dtype: str
    elements: int
    """Numbers that a rank contributes at the most, with a codec those of whole blocks."""
    codec: str = ""

    @property
    def kind(self) -> str:
        """The kind of its event."""
        return ALL_GATHER if self.owner < 0 else PUBLISH

    @property
    def operation(self) -> str:
        """What carries it out."""
        return ALL_GATHER if self.owner < 0 else "broadcast"


def shares_of_holders(plan: Plan, stage: int) -> dict[int, list[Rows]]:
    """Returns the rows that each holder of a stage updates, by rank; nothing: each updates all."""
    return _shares(plan, stage) if plan.shards_optimizer else {}


@derived
def _shares(plan: Plan, stage: int) -> dict[int, list[Rows]]:
    holders = groups(plan)[gradient_group(plan, stage)]
    if len(holders) == 1:
        return {}
    names = [*trained(plan, stage)]
    total = sum(plan.graph.params[name].num_elements for name in names)
    shares: dict[int, list[Rows]] = {rank: [] for rank in holders}
    begin = 0  # of a parameter, among all elements
    for name in names:
        rows, each, step = _rows_of(plan.graph.params[name])
        bounds = [0]
        for number in range(1, len(holders)):
            ideal = total * number / len(holders) - begin
            bounds.append(min(rows, max(bounds[-1], step * round(ideal / (each * step)))))
        for rank, first, last in zip(holders, bounds, [*bounds[1:], rows], strict=True):
            if first < last:
                shares[rank].append(Rows(name, first, last, (last - first) * each))
        begin += rows * each
    return shares


def _rows_of(parameter: Parameter) -> tuple[int, int, int]:
    # Rows, elements of each, and how many of them make a multiple of UNIT.
    rows = parameter.shape[0] if parameter.shape else 1
    each = parameter.num_elements // max(1, rows)
    return rows, max(1, each), UNIT // math.gcd(UNIT, max(1, each))


@derived
def publications(plan: Plan, stage: int) -> list[Publication]:
    """Returns what follows an update: one gather of scattered sums, else one of each owner."""
    dtype = wide_dtype(plan.dtype)  # training keeps its parameters in this type
    codec = codec_of(plan, "parameter")
    padded = codec_named(codec).padded if codec else int
    shares = {rank: (*rows,) for rank, rows in shares_of_holders(plan, stage).items() if rows}
    sizes = {rank: sum(padded(part.elements) for part in rows) for rank, rows in shares.items()}
    if plan.scatters and shares:
        every = tuple(part for rows in shares.values() for part in rows)
        return [Publication(-1, every, dtype, max(sizes.values()), codec)]
    return [Publication(rank, rows, dtype, sizes[rank], codec) for rank, rows in shares.items()]


def updated_elements(plan: Plan, rank: int) -> int:
    """Returns how many elements of the parameters a rank updates."""
    shares = {stage: shares_of_holders(plan, stage) for stage in held_stages(plan, rank)}
    own_rows = sum(part.elements for own in shares.values() if own for part in own[rank])
    whole = (name for stage, own in shares.items() if not own for name in trained(plan, stage))
    return own_rows + sum(plan.graph.params[name].num_elements for name in whole)


def division_notes(plan: Plan, sent_bytes: int) -> list[Finding]:
    """Returns a note on what dividing the optimiser's state is worth, and on the bytes it sends."""
    if not plan.shards_optimizer or not plan.training:
        return []
    if not any(shares_of_holders(plan, stage.index) for stage in plan.stages):
        text = (
            "optimizer.shard=true divides nothing: each stage is held by one rank; leave it "
            "out, or use parallel.replicas, parallel.tiles or parallel.directions=2"
        )
        return [Finding("warning", "optimizer.shard", text)]
    most = max(updated_elements(plan, rank) for rank in range(plan.world))
    held = (held_stages(plan, rank) for rank in range(plan.ranks_per_replica))
    whole = max(sum(plan.stages[stage].params for stage in stages) for stages in held)
    way = "reduce-scatters and all-gathers" if plan.scatters else "all-reduces and broadcasts"
    text = (
        f"a rank moves, and keeps the optimiser's state of, {most:,} of up to {whole:,} numbers; "
        f"gradients and parameters travel by {way}, {size(sent_bytes)} a step of all ranks"
    )
    return [Finding("note", "optimizer.shard", text)]
