"""Reads the lines of steps and epochs that ranks wrote, through attempts that continue another.

a0   0 1 2 3 4 5      preempted, or killed
a1           4 5 6 7  began at step 4 of a0: its steps 0 to 3 are those of a0
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hires.core import units
from hires.core.errors import RunError
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import StrPath
from hires.core.store.reading import Values

EVALUATED_LINE, PREDICTED_LINE = "evaluated", "predicted"
"""Kinds of the lines that hold what a rank counted, or predicted, in a step of one pass."""
VALIDATED_LINE = "validated"
"""Kind of the lines that hold an evaluation in the middle of a training."""
ENDED_LINE = "ended_early"
"""Kind of the line of a training that ended before its last step, since it got no better."""
EPOCH_LINE = "epoch"
"""Kind of the lines that sum up an epoch."""
BANDS_LINE = "bands"
"""Kind of the lines that say how far a step has come that computes images in bands of rows."""
PASS_LINES = {"evaluate": EVALUATED_LINE, "predict": PREDICTED_LINE}
"""``task`` -> the kind of its lines."""


class EarlierSteps(NamedTuple):
    """An attempt that another one continues."""

    attempt: Attempt
    steps: range
    """Its steps that count: those after are done again."""


def begin_of(lines: Sequence[Values]) -> Values | None:
    """Returns the line of the checkpoint at which an attempt began; None at step 0."""
    return next((line for line in lines if line.get("kind") == "begin"), None)


def earlier_steps(own: Attempt) -> Iterator[EarlierSteps]:
    """Yields the attempts of the run that one continues, the latest first; RunError: damaged."""
    begin, attempt = begin_of(own.metrics), own.number
    while begin is not None and begin["attempt"] is not None and begin["attempt"] < attempt:
        attempt, end = begin["attempt"], begin["step"]
        before = Attempt(own.run, attempt, strict=True)
        begin = begin_of(before.metrics)
        yield EarlierSteps(before, range(begin["step"] if begin else 0, end))


def lines_before(own: Attempt, kind: str) -> tuple[list[Values], Values | None]:
    """Returns the lines of a kind, one a step, of the attempts that this one continues, in order.

    It also returns the line of the checkpoint at which the first of them began; None at step 0.
    Steps before it are another run's.
    """
    lines: list[Values] = []
    begin = begin_of(own.metrics)
    for attempt, steps in earlier_steps(own):
        held = attempt.metrics
        before = [line for line in _of_kind(held, kind) if line["step"] < steps.stop]
        lines = before + lines  # the latest attempt comes first
        begin = begin_of(held)
    return lines, begin


def pass_lines(own: Attempt, kind: str) -> list[Values]:
    """Returns the lines of a kind of every step of one pass, earlier attempts included."""
    return [*lines_before(own, kind)[0], *_of_kind(own.metrics, kind)]


def done_pass(
    run: StrPath, numbers: Sequence[int], world: int, kind: str
) -> tuple[int, int | None]:
    """Returns after how many steps one pass can go on, and which of some attempts did them.

    Such a step has lines of all ranks, and so have all steps before it. (0, None): there is none.
    """
    best: tuple[int, int | None] = (0, None)
    for number in numbers:
        with contextlib.suppress(RunError):  # damaged: what it did is done again
            own = Attempt(run, number, strict=True)
            before, first = lines_before(own, kind)
            done = 0
            every = by_step([*before, *own.metrics], kind)
            # At step 0 it may have begun with the parameters of another run.
            at_first = first is None or first["step"] == 0
            while at_first and len(every.get(done, ())) == world:
                done += 1
            best = max(best, (done, number), key=lambda one: one[0])
    return best


def by_step(lines: Sequence[Values], kind: str = "step") -> dict[int, dict[int, Values]]:
    """Returns the lines of a kind, by step and rank."""
    steps: dict[int, dict[int, Values]] = {}
    for line in _of_kind(lines, kind):
        steps.setdefault(line["step"], {})[line["rank"]] = line
    return steps


def _of_kind(lines: Sequence[Values], kind: str) -> list[Values]:
    return [line for line in lines if line.get("kind") == kind]


def line_text(line: Mapping[str, Any]) -> str | None:
    """Returns what a line of the ranks says of an epoch, evaluation or end; or None."""
    texts = {
        EPOCH_LINE: epoch_text,
        VALIDATED_LINE: evaluation_text,
        BANDS_LINE: bands_text,
        ENDED_LINE: _once,
    }
    text = texts.get(str(line.get("kind")))
    return None if text is None else text(line)


def ended_text(facts: Mapping[str, Any]) -> str:
    """Returns ``ended early after step 12: no better top1 in 3 evaluations ...``."""
    number, metric = facts.get("patience"), facts.get("metric")
    over = "" if number is None else f" in {number} evaluation{'' if number == 1 else 's'}"
    return (
        f"ended early after step {facts['step']}: no better {metric or 'number'}{over} "
        f"(validate.patience)"
    )


def epoch_text(line: Mapping[str, Any]) -> str:
    """Returns ``epoch 3, mean loss 0.41, 14.2 s, about 43 s left``."""
    words = [f"epoch {line['epoch']}"]
    words += [f"mean loss {line['loss']:.4g}"] if line.get("loss") is not None else []
    words.append(units.seconds(line["epoch_s"]))
    words += [f"about {units.seconds(line['left_s'])} left"] if line["left_s"] else []
    return ", ".join(words)


def bands_text(line: Mapping[str, Any]) -> str:
    """Returns ``step 1: 128 of 268 megapixels, about 2 min left``."""
    done, left = f"{line['done']:.4g} of {line['total']:.4g}", units.seconds(line["left_s"])
    return f"step {line['step'] + 1}: {done} megapixels, about {left} left"


def evaluation_text(line: Mapping[str, Any]) -> str:
    """Returns ``evaluated after step 12: top1 0.93, loss 0.21, the best so far``."""
    names = dict.fromkeys((line["metric"], "loss"))
    words = [f"{name} {line[name]:.4g}" for name in names if line.get(name) is not None]
    words += ["the best so far"] if line["better"] else []
    return f"evaluated after step {line['step'] + 1}: {', '.join(words) or 'nothing finite'}"


def _once(line: Mapping[str, Any]) -> str | None:
    # Every rank writes this line; it is printed once.
    return ended_text(line) if line.get("rank") == 0 else None
