"""What does every rank do in a step: the planned and measured time line, and where time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from hires.report.load import time_split
from hires.report.plots import style
from hires.report.plots.base import MAX_RANKS, Material, Plot, Shown
from hires.report.trace_file import planned_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 4
"""Runs whose time lines a figure has room for."""
_FINEST = 1 / 1500
"""Share of a step below which spans of one kind next to each other are drawn as one."""
_NAMED = 1 / 40
"""Share of a step from which a pass has room for its name."""
_MISSING = (
    f"no run that is drawn kept the time line of its last steps, or all have more than {MAX_RANKS} "
    f"ranks"
)
_ORDER = (FORWARD, BACKWARD, HALO, COLLECTIVE, WAIT, GRADIENTS, OPTIMISER, DATA)
_LABELS = {**time_split.LABELS, WAIT: "wait for a stage"}


def timeline(material: Material) -> Plot:
    """Returns the planned and the last measured step of some runs, a row for each rank."""
    plot = Plot("timeline", "Pipeline time line, planned and measured", wide=True)
    held = [shown for shown in material.shown if shown.steps and shown.plan is not None]
    held = sorted(held, key=_interest)[:DRAWN]
    if not held:
        plot.missing = _MISSING
        return plot
    rows = [n for shown in held for n in (shown.plan.world if shown.plan else 1,) * 2]
    made, axes = style.figure(
        2 * len(held),
        1,
        sum(0.17 * n + 0.34 for n in rows) + 0.75,
        gridspec_kw={"height_ratios": [n + 0.9 for n in rows]},
    )
    said = [_draw_run(axes[2 * i][0], axes[2 * i + 1][0], shown) for i, shown in enumerate(held)]
    style.legend(made, [axis for row in axes for axis in row], 5)
    plot.figure = made
    plot.caption = (
        f"Above, the schedule with all passes equally long; below, the last measured step. "
        f"{'; '.join(said)}."
    )
    return plot


def split_step(material: Material) -> Plot:
    """Returns where the time of a step goes, on every rank of the runs that are drawn."""
    plot = Plot("step_split", "Where the time of a step goes")
    held = [
        (shown, time_split.split_steps(shown.plan, shown.counted))
        for shown in material.shown
        if shown.plan is not None and shown.counted
    ]
    if not held:
        warm = any(shown.steps for shown in material.shown)
        plot.missing = "all steps whose time line was kept are warm-up" if warm else _MISSING
        return plot
    names = [(shown, rank, parts) for shown, ranks in held for rank, parts in enumerate(ranks)]
    made, axes = style.figure(1, 1, 1.2 + 0.2 * len(names) + 0.1 * len(held))
    axis, places = axes[0][0], _places([len(ranks) for _, ranks in held])
    left = [0.0] * len(names)
    for part in time_split.PARTS:
        values = [1e3 * parts.get(part, 0.0) for *_, parts in names]
        if max(values) > 0:
            colour, hatch = style.KINDS[part]
            label = time_split.LABELS.get(part, part)
            axis.barh(places, values, 0.8, left=left, color=colour, hatch=hatch, label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(places, [f"{style.short(s.label)}  {rank}" for s, rank, _ in names])
    axis.invert_yaxis()
    axis.set_xlabel("mean of the last steps after the warm-up [ms]")
    style.no_grid(axis, "y")
    style.legend(made, [axis], 5)
    plot.figure = made
    plot.caption = (
        f"One bar a rank, of the last attempt. {'; '.join(_split_words(*item) for item in held)}."
    )
    return plot


def _interest(shown: Shown) -> tuple[bool, bool]:
    """Returns the order of time lines: pipelines have most to show, one rank the least."""
    assert shown.plan is not None
    return len(shown.plan.stages) == 1, shown.plan.world == 1


def _draw_run(above: Axes, below: Axes, shown: Shown) -> str:
    """Draws the two time lines of a run, and returns it in words."""
    assert shown.plan is not None
    number, ranks = list(shown.steps.items())[-1]
    took_s = length_s(ranks)
    _draw(above, planned_steps(shown.plan, took_s), took_s, planned=True)
    _draw(below, ranks, took_s, planned=False)
    above.set_title(f"{style.short(shown.label, 50)}: planned", fontsize=8.5)
    below.set_title(f"measured, step {number} [ms]", fontsize=8.5, fontweight="normal")
    above.tick_params(axis="x", labelbottom=False)
    world = shown.plan.world
    return f"{shown.label}: {took_s * 1e3:.1f} ms on {world} rank{'' if world == 1 else 's'}"


def _draw(axis: Axes, ranks: list[StepSpans], took_s: float, planned: bool) -> None:
    """Draws one time line, the first rank on top."""
    for rank in ranks:
        for level, kind in enumerate(_ORDER):
            merged = _merged([s for s in rank.spans if s.kind == kind], took_s)
            if not merged:
                continue
            colour, hatch = style.KINDS[kind]
            axis.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin)) for begin, end in merged],
                (rank.rank - 0.41, 0.82),
                facecolors=colour,
                hatch=hatch if planned or kind not in (HALO, COLLECTIVE) else None,
                linewidth=0,
                label=_LABELS.get(kind, kind),
                zorder=2 + level / 10,
            )
        for span in rank.spans:
            if span.kind in (FORWARD, BACKWARD) and span.duration_s > _NAMED * took_s:
                _name(axis, rank.rank, span)
    axis.set_ylim(max((r.rank for r in ranks), default=0) + 0.55, -0.55)
    axis.set_xlim(0, 1e3 * took_s or 1)
    axis.set_yticks([r.rank for r in ranks][:: max(1, len(ranks) // 16)])
    axis.set_ylabel("rank", fontsize=8)
    style.no_grid(axis, "y")


def _name(axis: Axes, rank: int, span: Span) -> None:
    """Writes the name of a pass where it begins."""
    axis.annotate(
        span.action,
        (1e3 * span.begin_s, rank),
        xytext=(2, 0),
        textcoords="offset points",
        fontsize=6.5,
        va="center",
        color="white" if span.kind == FORWARD else "black",
        zorder=5,
        clip_on=True,
    )


def _merged(spans: list[Span], took_s: float) -> list[tuple[float, float]]:
    """Returns begin and end of spans, in seconds; those that nobody could tell apart are one."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.begin_s):
        if found and span.begin_s - found[-1][1] < _FINEST * took_s:
            found[-1] = found[-1][0], max(found[-1][1], span.end_s)
        else:
            found.append((span.begin_s, span.end_s))
    return found


def _places(counts: list[int]) -> list[float]:
    """Returns where the bars of the runs stand, with a gap between runs."""
    places, place = [], 0.0
    for count in counts:
        for _ in range(count):
            places.append(place)
            place += 1
        place += 0.5
    return places


def _split_words(shown: Shown, ranks: list[dict[str, float]]) -> str:
    """Returns the shares of a run in words."""
    total = sum(sum(parts.values()) for parts in ranks) or 1.0
    shares = {
        part: sum(parts.get(part, 0.0) for parts in ranks) / total for part in time_split.PARTS
    }
    top = sorted(shares, key=lambda part: -shares[part])[:3]
    said = [f"{100 * shares[part]:.0f} % {time_split.LABELS.get(part, part)}" for part in top]
    if time_split.BUBBLE not in top and shares[time_split.BUBBLE] > 0.005:
        said.append(f"{100 * shares[time_split.BUBBLE]:.0f} % bubble")
    return f"{shown.label}: {', '.join(said)}"
