"""Shows the layouts that a search found, the best first, and why the others are out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hires.cli.screens.screen import table_lines
from hires.core.config.parallel_config import OBJECTIVES
from hires.core.units import seconds, size
from hires.plan.search.choice import Choice, Option

SHOWN = 12
"""Layouts in the table, the best of each division of the ranks; ``--json`` has all."""
SHOWN_REASONS = 6
MEANING = {
    "compute": "computing takes most of the step",
    "messages": "waiting for messages takes most of it",
    "bubble": "waiting for other stages takes most of it",
    "cores": "ranks wait for cores or GPUs that others use: there are more ranks than these",
    "memory": "memory decides: nearly all of it is used, or passes are computed again to save it",
}
"""What the column ``limited by`` says."""


def choice_lines(choice: Choice) -> list[str]:
    """Returns the answer of ``hires plan --choose`` in lines."""
    options = best_of_shapes(choice.options)[:SHOWN]
    head = ["", "layout", "step", "images/s", "memory", "bubble", "sent", "limited by", "keys"]
    rows = [head, *(_row(number, one) for number, one in enumerate(options, start=1))]
    lines = table_lines(rows, "rlrrrrrll")
    order = "least memory first" if choice.objective == "memory" else "fastest first"
    ranks = f"{choice.ranks} rank{'s' if choice.ranks > 1 else ''}"
    text = [f"Layouts of {ranks} that fit, {order}", "", *lines, ""]
    if any(not one.rehearsed for one in options):
        text.append("~ memory that was estimated; a run's plan predicts it exactly")
    text += [f"{name}: {MEANING[name]}" for name in MEANING if name in {o.limit for o in options}]
    text += [*_others(choice), f"step times: {choice.source}"]
    first, config = choice.best.candidate.overrides, choice.best.config
    if config.launcher.has_jobs:  # `hires plan --nodes` has set them, perhaps
        first = f"launcher.nodes={config.launcher.nodes} {first}"
    if choice.objective == OBJECTIVES[2]:
        first = f"image=[{config.height},{config.width}] {first}"
    text += [f"to run the first: hires run parallel=auto ..., or with its keys: {first}"]
    return text


def best_of_shapes(options: Sequence[Option]) -> list[Option]:
    """Returns the first option of each division of the ranks, in their order."""
    first: dict[object, Option] = {}
    for option in options:
        first.setdefault(option.candidate.shape, option)
    return [*first.values()]


def _row(number: int, option: Option) -> list[str]:
    memory = size(option.peak_bytes)
    return [
        str(number),
        option.config.parallel.label,
        seconds(option.time.step_s),
        f"{option.images_per_s:.3g}",
        memory if option.rehearsed else f"~{memory}",
        f"{option.time.bubble:.0%}",
        size(option.sent_bytes),
        option.limit,
        option.candidate.overrides,
    ]


def _others(choice: Choice) -> Iterable[str]:
    planned = f"{choice.planned} of {choice.considered} layouts were planned"
    earlier = "; this is an earlier search (HIRES_CACHE=off searches anew)" if choice.kept else ""
    yield f"{planned} in {seconds(choice.seconds)}{earlier}"
    if choice.left:
        yield f"{choice.left} were not: they are slower by their estimate, or resemble a faster one"
    more = len(choice.options) - min(SHOWN, len(best_of_shapes(choice.options)))
    if more > 0:
        yield f"{more} more that fit, most with other orders or cuts of the same ranks: --json"
    for one in choice.out[:SHOWN_REASONS]:
        needs = f"needs {size(one.peak_bytes)} on its fullest rank"
        yield f"out: {one.candidate.overrides} ({needs if one.limit in MEANING else one.limit})"
    for reason, count in choice.reasons.most_common(SHOWN_REASONS):
        yield f"out: {count} layout{'s' if count > 1 else ''}: {reason}"
