"""Are time lines drawn in proportion?"""

from __future__ import annotations

from hires.core.timeline import (
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
)
from hires.plan.costs import unit_costs
from hires.plan.simulate import simulate
from hires.report.drawn import draw, timeline_lines
from tests.helpers.small_plans import plan_of


def test_columns_are_time():
    spans = [
        Span(DATA, "F0", 0.0, 1.0),
        Span(FORWARD, "F0", 1.0, 6.0),
        Span(HALO, "F0", 4.0, 5.0),
        Span(WAIT, "B0", 6.0, 8.0),
        Span(BACKWARD, "B0", 8.0, 13.0),
        Span(COLLECTIVE, "B0", 11.0, 12.0),
        Span(GRADIENTS, "", 13.0, 14.0),
        Span(OPTIMISER, "", 14.0, 15.0),
    ]
    assert draw(spans, 16.0, 16) == "dF0f~f..B0b~bgo."
    assert draw(spans, 16.0, 32) == "ddF0ffff~~ff....B0bbbb~~bbggoo.."


def test_short_pass_gets_one_column():
    assert draw([Span(FORWARD, "F0", 2.0, 2.001)], 4.0, 4) == "..F."


def test_measured_stands_below_planned_one_line_a_rank():
    plan = plan_of(stages=2, microbatches=2)
    steps = simulate(plan, unit_costs(plan)).ranks
    lines = timeline_lines(plan, [*steps], width=10 + 6 * 4)
    planned = ["  rank 0: F0ffF1ff........B0bbB1bb", "  rank 1: ....F0ffF1ffB0bbB1bb...."]
    assert lines[1:3] == planned
    assert lines[4] == "measured, step 0: 6.0000 s"
    assert [line.replace(" ", "")[:8] for line in lines[5:7]] == ["rank0:F0", "rank1:.."]


def test_rank_without_spans_is_an_idle_line():
    plan = plan_of()
    lines = timeline_lines(plan, [StepSpans(0, 3, "", 0.0)], width=20)
    assert lines[4] == "  rank 0: .........."
