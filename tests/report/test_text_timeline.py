"""Are time lines drawn in proportion?"""

from __future__ import annotations

from hires.core.ranks.timeline import FORWARD, Span, StepSpans
from hires.plan.simulation.simulate import simulate
from hires.report.text_timeline import draw, timeline_lines
from tests.helpers.simulated import STEP, unit_costs
from tests.helpers.small_plans import plan_of


def test_columns_are_time():
    assert draw(STEP, 16.0, 16) == "dF0~~f..B0b~bgo."
    assert draw(STEP, 16.0, 32) == "ddF0ff~~~~ff....B0bbbb~~bbggoo.."


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
