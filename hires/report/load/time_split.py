"""Where does the time of a step go? The measured time line of a rank, divided by what it did."""

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
from hires.plan.posts import edge_messages

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
"""Names of parts that are not their own."""

Passes = dict[tuple[int, str], float]
"""When a pass of a rank ended, in seconds."""


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
    return [dict(found) for found in sums]


def split_rank(plan: Plan, rank: StepSpans, ends: Passes, whole_s: float) -> dict[str, float]:
    """Returns seconds of each part of one rank's step.

    A wait is bubble until the sender's pass has ended: there was nothing to send. What is left of
    it is the message. Halos and batch statistics are taken out of the pass they lie in.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    inner = [span for span in rank.spans if span.kind in (HALO, COLLECTIVE)]
    for span in rank.spans:
        if span.kind == WAIT:
            idle_s = _idle_s(plan, rank.rank, span, ends)
            parts[BUBBLE] += idle_s
            parts[PIPELINE] += span.duration_s - idle_s
        elif span.kind in (FORWARD, BACKWARD):
            talk_s = sum(_common_s(span, other) for other in inner)
            parts[span.kind] += max(0.0, span.duration_s - talk_s)
        elif span.kind in parts:
            parts[span.kind] += span.duration_s
    parts[BUBBLE] += max(0.0, whole_s - max((span.end_s for span in rank.spans), default=whole_s))
    parts[OTHER] = max(0.0, whole_s - sum(parts.values()))
    return parts


def _idle_s(plan: Plan, rank: int, span: Span, ends: Passes) -> float:
    """Returns for how much of a wait the other side had nothing to send yet."""
    if not span.action:
        return 0.0
    messages = edge_messages(plan, rank, span.action, outgoing=False)
    sent = [ends[m.peer, span.action] for m in messages if (m.peer, span.action) in ends]
    return max(0.0, min(span.end_s, max(sent, default=span.begin_s)) - span.begin_s)


def _common_s(a: Span, b: Span) -> float:
    """Returns for how long two spans last at the same time."""
    return max(0.0, min(a.end_s, b.end_s) - max(a.begin_s, b.begin_s))
