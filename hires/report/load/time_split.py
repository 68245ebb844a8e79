"""Splits the time of a step by what a rank did, from its measured time line."""

from __future__ import annotations

from collections import defaultdict

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    WAIT,
    Span,
    StepSpans,
    length_s,
)
from hires.plan.plan import Plan
from hires.plan.program import edge_messages

PIPELINE, BUBBLE, OTHER = "pipeline", "bubble", "other"
PARTS = (
    DATA, FORWARD, BACKWARD, HALO, COLLECTIVE, PIPELINE, GRADIENTS, OPTIMISER, BUBBLE, OTHER,
)  # fmt: skip
"""Parts of a step; together they are as long as the step."""
LABELS = {
    COLLECTIVE: "batch statistics",
    GRADIENTS: "all-reduce",
    PIPELINE: "pipeline messages",
    BUBBLE: "bubble",
    OTHER: "between spans",
}
"""Labels of parts that differ from their names."""

PassEnds = dict[tuple[int, str], float]
"""When a pass ended, in seconds, by rank and action."""


def split_steps(plan: Plan, steps: dict[int, list[StepSpans]]) -> list[dict[str, float]]:
    """Returns seconds of each part for every rank, the mean of the kept steps.

    Args:
        plan: of the run.
        steps: complete steps on one clock.
    """
    sums: list[dict[str, float]] = [defaultdict(float) for _ in range(plan.world)]
    for ranks in steps.values():
        ends = {
            (rank.rank, span.action): span.end_s
            for rank in ranks
            for span in rank.spans
            if span.kind in (FORWARD, BACKWARD)
        }
        whole_s = length_s(ranks)
        for rank in ranks:
            for part, seconds in split_rank(plan, rank, ends, whole_s).items():
                sums[rank.rank][part] += seconds / len(steps)
    return [dict(parts) for parts in sums]


def split_rank(plan: Plan, rank: StepSpans, ends: PassEnds, whole_s: float) -> dict[str, float]:
    """Returns seconds of each part of one rank's step.

    A wait is bubble until the sender's pass has ended, because nothing could be sent before; the
    rest of it is the message. Halos and batch statistics are taken out of the pass around them.

        sender    |  F0  |
        this rank |bubble|message|  F0  |halo|  F0  |
    """
    parts = dict.fromkeys(PARTS, 0.0)
    inner = [span for span in rank.spans if span.kind in (HALO, COLLECTIVE)]
    for span in rank.spans:
        if span.kind == WAIT:
            idle_s = _idle_s(plan, rank.rank, span, ends)
            parts[BUBBLE] += idle_s
            parts[PIPELINE] += span.duration_s - idle_s
        elif span.kind in (FORWARD, BACKWARD):
            inside = (min(span.end_s, o.end_s) - max(span.begin_s, o.begin_s) for o in inner)
            parts[span.kind] += max(0.0, span.duration_s - sum(max(0.0, s) for s in inside))
        elif span.kind in parts:
            parts[span.kind] += span.duration_s
    parts[BUBBLE] += max(0.0, whole_s - max((span.end_s for span in rank.spans), default=whole_s))
    parts[OTHER] = max(0.0, whole_s - sum(parts.values()))
    return parts


def _idle_s(plan: Plan, rank: int, span: Span, ends: PassEnds) -> float:
    """Returns the seconds of a wait before the sender's pass had ended."""
    if not span.action:
        return 0.0
    messages = edge_messages(plan, rank, span.action, outgoing=False)
    sent = [ends[m.peer, span.action] for m in messages if (m.peer, span.action) in ends]
    return max(0.0, min(span.end_s, max(sent, default=span.begin_s)) - span.begin_s)
