"""Draws a step as text: one line a rank, as wide as the screen, in proportion to time."""

from __future__ import annotations

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    Span,
    StepSpans,
    complete_steps,
    length_s,
)
from hires.plan.plan import Plan
from hires.report.trace_file import planned_steps

_IDLE, _WAITING = ".", "~"
_FILL = {FORWARD: "f", BACKWARD: "b", OPTIMISER: "o", DATA: "d", GRADIENTS: "g"}
LEGEND = (
    "F0fff forward of microbatch 0, B0bbb its backward, ~ waiting for other tiles inside a pass, "
    "g sum of gradients, o optimiser, d data, . idle or waiting for another stage"
)


def timeline_lines(plan: Plan, steps: list[StepSpans], width: int) -> list[str]:
    """Returns the planned and the last measured time line of a run in ``width`` columns."""
    number, ranks = list(complete_steps(steps, plan.world).items())[-1]
    took_s = length_s(ranks)
    return [
        "planned, every pass equally long",
        *_lines(planned_steps(plan, took_s), took_s, width),
        "",
        f"measured, step {number}: {took_s:.4f} s",
        *_lines(ranks, took_s, width),
        "",
        LEGEND,
    ]


def _lines(ranks: list[StepSpans], took_s: float, width: int) -> list[str]:
    digits = max((len(str(rank.rank)) for rank in ranks), default=1)
    room = max(8, width - len("  rank : ") - digits)
    return [f"  rank {r.rank:>{digits}}: {draw(r.spans, took_s, room)}" for r in ranks]


def draw(spans: list[Span], took_s: float, width: int) -> str:
    """Returns what one rank did as ``width`` characters.

    A span fills the columns from its begin to its end, rounded, and work at least one; a pass
    begins with its name, as far as that fits.
    """
    cells = [_IDLE] * width
    scale = width / took_s if took_s else 0.0

    def columns(span: Span, at_least: int) -> range:
        first = min(width - 1, round(span.begin_s * scale))
        return range(first, min(width, max(first + at_least, round(span.end_s * scale))))

    for span in (s for s in spans if s.kind in _FILL):
        name = span.action if span.kind in (FORWARD, BACKWARD) else ""
        for place, column in enumerate(columns(span, 1)):
            cells[column] = name[place] if place < len(name) else _FILL[span.kind]
    for span in (s for s in spans if s.kind in (HALO, COLLECTIVE)):
        for column in columns(span, 0):
            if cells[column] in _FILL.values():
                cells[column] = _WAITING
    return "".join(cells)
