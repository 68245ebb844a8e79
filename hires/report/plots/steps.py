"""Plots what every rank does in a step, how long it takes, and the messages between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.ticker import MaxNLocator

from hires.core.ranks.timeline import BACKWARD, COLLECTIVE, FORWARD, HALO, WAIT, StepSpans
from hires.core.units import MIB
from hires.plan import traffic
from hires.plan.plan import Plan
from hires.plan.program import edge_messages
from hires.report.logged_messages import MessageSums, message_sums, size_words
from hires.report.plots import style
from hires.report.plots.base import MAX_RANKS, MAX_RUNS, Drawing, PlotData, plot
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


_LOOKS = {
    "halo": (style.GREEN, "xx"),
    "norm": (style.YELLOW, "++"),
    "stage": (style.PURPLE, "\\\\"),
    "join": (style.ORANGE, "--"),
    "gradient": (style.VERMILION, "||"),
    "barrier": (style.KINDS["bubble"][1], ""),
    "gather": (style.SKY, "//"),
}
"""Colour and hatch of kinds of messages; others share one."""
_OTHERS = (style.BLUE, "+")


@plot(85, "message_costs", "What messages cost, by size")
def by_size(data: PlotData) -> Drawing | str:
    """Draws the time of a step's messages by size, a panel for each run that logged them."""
    every = [(drawn, message_sums(drawn.run.record.comm)) for drawn in data.runs]
    runs = [(drawn, sums) for drawn, sums in every if sums is not None and sums.rows][:MAX_RUNS]
    if not runs:
        return "no run that is drawn logged messages: they have one rank, or comm.log=off"
    fig, axes = style.panels(len(runs), 2, 2.2)
    for axis, (drawn, sums) in zip(axes, runs, strict=True):
        style.title(axis, drawn.label)
        _draw_costs(axis, sums)
    style.legend(fig, axes)
    return Drawing(fig, "Time of the mean rank in the calls and waits of a step.")


def _draw_costs(axis: Axes, sums: MessageSums) -> None:
    rows = sums.by("kind", "size")
    sizes = sorted({row["size"] for row in rows})
    bottom = dict.fromkeys(sizes, 0.0)
    for row in sorted(rows, key=lambda row: [*_LOOKS, row["kind"]].index(row["kind"])):
        kind, size, cost_ms = row["kind"], row["size"], 1e3 * (row["issue_s"] + row["wait_s"])
        colour, hatch = _LOOKS.get(kind, _OTHERS)
        axis.bar(
            sizes.index(size), cost_ms, 0.8, bottom=bottom[size], color=colour, hatch=hatch,
            label=kind if kind in _LOOKS else "other kinds",
        )  # fmt: skip
        bottom[size] += cost_ms
    each = -(-len(sizes) // 5)
    axis.set_xticks(range(len(sizes))[::each], [size_words(size) for size in sizes[::each]])
    axis.tick_params(axis="x", labelsize=7)
    axis.set_ylabel("ms a step")
    axis.yaxis.set_major_locator(MaxNLocator(4))
    style.no_grid(axis, "x")


@plot(80, "traffic", "Traffic from rank to rank")
def between_ranks(data: PlotData) -> Drawing | str:
    """Draws a matrix of bytes for every run with several ranks."""
    every = [(drawn, traffic.matrix(plan)) for drawn, plan in data.plans]
    matrices = [(drawn, sent) for drawn, sent in every if any(map(any, sent))]
    if not matrices:
        return "no run that is drawn has ranks that send each other anything"
    most = max(max(map(max, sent)) for _, sent in matrices) / MIB
    fig, axes = style.panels(len(matrices), 3, 2.2)
    for axis, (drawn, sent) in zip(axes, matrices, strict=True):
        image = _draw_traffic(axis, sent, most)
        style.title(axis, drawn.label)
    bar = fig.colorbar(image, ax=axes, pad=0.02, shrink=0.8, aspect=18)
    bar.set_label("MiB/step")
    bar.outline.set_visible(False)
    return Drawing(
        fig,
        "Bytes of one step of the plan, from the rank on the left to the rank below. A sum of "
        "gradients is drawn as if each rank sent the same to every other.",
    )


def _draw_traffic(axis: Axes, sent: list[list[float]], most: float) -> QuadMesh:
    """Draws bytes by source and target rank, ``most`` MiB in the darkest colour."""
    values = np.array(sent) / MIB
    edges = np.arange(len(sent) + 1) - 0.5
    cells = np.ma.masked_equal(values, 0)
    image = axis.pcolormesh(edges, edges, cells, cmap="viridis_r", vmin=0, vmax=most)
    axis.invert_yaxis()
    axis.set_aspect("equal", anchor="W")
    axis.grid(False)
    ticks = range(0, len(sent), max(1, len(sent) // 8))
    axis.set(xticks=ticks, yticks=ticks, xlabel="to rank", ylabel="from rank")
    if len(sent) <= 4:
        for (row, column), value in np.ndenumerate(values):
            if value:
                dark = "white" if value > most / 2 else "black"
                text = f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color=dark)
    return image
