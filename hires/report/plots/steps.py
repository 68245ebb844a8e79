"""Plots what every rank does in a step: planned and measured time line, and the time it takes."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from hires.core.ranks.timeline import BACKWARD, COLLECTIVE, FORWARD, HALO, WAIT, StepSpans
from hires.plan.plan import Plan
from hires.plan.program import edge_messages
from hires.report.plots import style
from hires.report.plots.base import MAX_RANKS, Drawing, PlotData, plot
from hires.report.timelines import length_s, passes_of, planned_steps

PIPELINE, BUBBLE, OTHER = "pipeline", "bubble", "other"
PARTS = tuple(kind for kind in style.KINDS if kind != WAIT)
"""Parts of a step; together they are as long as the step."""
MAX_TIMELINES = 4  # runs whose time lines fit into a figure
_FINEST = 1 / 1500
"""Share of a step: spans of one kind with a smaller gap are drawn as one, shorter parts not."""
_NAME = 0.2  # inches of a pass that has room for its name
_MISSING = f"no run drawn kept the time line of its last steps, or all have over {MAX_RANKS} ranks"


@plot(60, "step_split", "Where the time of a step goes")
def split_step(data: PlotData) -> Drawing | str:
    """Draws where the time of a step goes, one bar for each rank."""
    runs = []
    for drawn, plan in data.plans:
        discarded = drawn.run.record.discarded
        counted = {step: ranks for step, ranks in drawn.steps.items() if step not in discarded}
        runs += [(drawn, split_steps(plan, counted))] if counted else []
    if not runs:
        warm_up = any(drawn.steps for drawn in data.runs)
        return "all steps whose time line was kept are warm-up" if warm_up else _MISSING
    bars = [(drawn, rank, parts) for drawn, ranks in runs for rank, parts in enumerate(ranks)]
    fig, [axis] = style.panels(1, 1, 0.6 + 0.2 * len(bars))
    longest_s = max(sum(parts.values()) for *_, parts in bars)
    left_ms = [0.0] * len(bars)
    for part in PARTS:
        times_ms = [1e3 * parts[part] for *_, parts in bars]
        if max(times_ms) > 1e3 * _FINEST * longest_s:
            label, colour, hatch = style.KINDS[part]
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "label": label}
            axis.barh(range(len(bars)), times_ms, 0.8, left=left_ms, **look)
        left_ms = [left + time for left, time in zip(left_ms, times_ms, strict=True)]
    style.named_rows(axis, [f"{style.short(drawn.label, 22)}  {rank}" for drawn, rank, _ in bars])
    axis.invert_yaxis()
    axis.set_xlabel("mean step after the warm-up [ms]")
    style.legend(fig, [axis])
    return Drawing(fig, "One bar a rank, of the last attempt.")


@plot(70, "timeline", "Pipeline time line, planned and measured", wide=True)
def timeline(data: PlotData) -> Drawing | str:
    """Draws the planned and the last measured step of some runs, a row for each rank."""
    runs = [(drawn, plan) for drawn, plan in data.plans if drawn.steps]
    # Pipelines have most to show, a single rank the least.
    runs.sort(key=lambda item: (len(item[1].stages) == 1, item[1].world == 1))
    runs = runs[:MAX_TIMELINES]
    if not runs:
        return _MISSING
    rows = [plan.world for _, plan in runs for _ in range(2)]
    high = sum(0.17 * n + 0.34 for n in rows) / len(rows)
    fig, axes = style.panels(len(rows), 1, high, height_ratios=[n + 0.9 for n in rows])
    for above, below, (drawn, plan) in zip(axes[::2], axes[1::2], runs, strict=True):
        number, ranks = list(drawn.steps.items())[-1]
        took_s = length_s(ranks)
        _draw(above, planned_steps(plan, took_s), took_s, planned=True)
        _draw(below, ranks, took_s, planned=False)
        above.set_title(f"{style.short(drawn.label, 50)}: planned", fontsize=8.5)
        below.set_title(f"measured, step {number} [ms]", fontsize=8.5, fontweight="normal")
        above.tick_params(axis="x", labelbottom=False, length=0)
    style.legend(fig, axes)
    return Drawing(
        fig, "Above, the schedule with all passes equally long; below, the last measured step."
    )


def split_steps(plan: Plan, steps: dict[int, list[StepSpans]]) -> list[dict[str, float]]:
    """Returns seconds of each part for every rank, the mean of some complete steps on one clock."""
    sums = [dict.fromkeys(PARTS, 0.0) for _ in range(plan.world)]
    for ranks in steps.values():
        ends = {key: span.end_s for key, span in passes_of(ranks).items()}
        whole_s = length_s(ranks)
        for rank in ranks:
            for part, seconds in split_rank(plan, rank, ends, whole_s).items():
                sums[rank.rank][part] += seconds / len(steps)
    return sums


def split_rank(
    plan: Plan, rank: StepSpans, ends: dict[tuple[int, str], float], whole_s: float
) -> dict[str, float]:
    """Returns seconds of each part of one rank's step.

    A wait is bubble until the sender's pass has ended, because nothing could be sent before; the
    rest of it is the message. Halos and batch statistics are taken out of the pass around them.

        sender    |  F0  |
        this rank |bubble|message|  F0  |halo|  F0  |

    ``ends`` holds when each pass of the step ended, by rank and action.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    inner = [span for span in rank.spans if span.kind in (HALO, COLLECTIVE)]
    for span in rank.spans:
        if span.kind == WAIT:
            sent = span.begin_s
            if span.action:
                messages = edge_messages(plan, rank.rank, span.action, outgoing=False)
                passes = [(message.peer, span.action) for message in messages]
                sent = max((ends[one] for one in passes if one in ends), default=sent)
            idle_s = max(0.0, min(span.end_s, sent) - span.begin_s)
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


def _draw(axis: Axes, ranks: list[StepSpans], took_s: float, planned: bool) -> None:
    room_s = took_s * _NAME / style.width()
    for rank in ranks:
        # Halos and batch statistics lie inside passes, and are drawn over them.
        for level, (kind, (label, colour, hatch)) in enumerate(style.KINDS.items()):
            spans = sorted((s.begin_s, s.end_s) for s in rank.spans if s.kind == kind)
            # Those too close to be told apart are one.
            merged: list[tuple[float, float]] = []
            for begin, end in spans:
                if merged and begin - merged[-1][1] < _FINEST * took_s:
                    begin, end = merged[-1][0], max(merged.pop()[1], end)
                merged.append((begin, end))
            if not merged:
                continue
            axis.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin)) for begin, end in merged],
                (rank.rank - 0.41, 0.82), facecolors=colour, linewidth=0,
                hatch=hatch if planned or kind not in (HALO, COLLECTIVE) else None,
                label=label, zorder=2 + level / 10,
            )  # fmt: skip
        for span in rank.spans:
            if span.kind in (FORWARD, BACKWARD) and span.duration_s > room_s:
                axis.annotate(
                    span.action, (1e3 * span.begin_s, rank.rank), xytext=(2, 0),
                    textcoords="offset points", fontsize=6.5, va="center",
                    color="white" if span.kind == FORWARD else "black", zorder=5, clip_on=True,
                )  # fmt: skip
    axis.set_ylim(max((r.rank for r in ranks), default=0) + 0.55, -0.55)
    axis.set_xlim(0, 1e3 * took_s or 1)
    axis.set_yticks([r.rank for r in ranks][:: max(1, len(ranks) // 16)])
    axis.set_ylabel("rank", fontsize=8)
    style.no_grid(axis, "y")
