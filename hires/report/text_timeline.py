"""How does a step look as text? One line a rank, as wide as the screen, in proportion to time."""

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

IDLE, TALK = ".", "~"
FILL = {FORWARD: "f", BACKWARD: "b", OPTIMISER: "o", DATA: "d", GRADIENTS: "g"}
LEGEND = (
    "F0fff forward of microbatch 0, B0bbb its backward, ~ waiting for other tiles inside a pass, "
    "g sum of gradients, o optimiser, d data, . idle or waiting for another stage"
)


def timeline_lines(plan: Plan, steps: list[StepSpans], width: int) -> list[str]:
    """Returns the planned and the last measured time line of a run.

    Args:
        plan: of the run.
        steps: what its ranks kept.
        width: columns of the screen.
    """
    measured = complete_steps(steps, plan.world)
    number, ranks = list(measured.items())[-1]
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
    """Returns one line a rank."""
    digits = max((len(str(rank.rank)) for rank in ranks), default=1)
    room = max(8, width - len("  rank : ") - digits)
    return [f"  rank {r.rank:>{digits}}: {draw(r.spans, took_s, room)}" for r in ranks]


def draw(spans: list[Span], took_s: float, width: int) -> str:
    """Returns what one rank did as ``width`` characters.

    A span fills the columns from its begin to its end, rounded, and work at least one; a pass says
    its name where it begins, as far as it has room.
    """
    cells = [IDLE] * width
    scale = width / took_s if took_s else 0.0
    for span in (s for s in spans if s.kind in FILL):
        first, end = _columns(span, scale, width)
        named = span.action if span.kind in (FORWARD, BACKWARD) else ""
        for column in range(first, end):
            at = column - first
            cells[column] = named[at] if at < len(named) else FILL[span.kind]
    for span in (s for s in spans if s.kind in (HALO, COLLECTIVE)):
        for column in range(*_columns(span, scale, width, at_least=0)):
            if cells[column] in FILL.values():
                cells[column] = TALK
    return "".join(cells)


def _columns(span: Span, scale: float, width: int, at_least: int = 1) -> tuple[int, int]:
    """Returns the first column of a span and the one after its last."""
    first = min(width - 1, round(span.begin_s * scale))
    return first, min(width, max(first + at_least, round(span.end_s * scale)))
