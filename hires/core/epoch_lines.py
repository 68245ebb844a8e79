"""Says in a line each what epochs and evaluations of a training came to; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hires.core import units
from hires.core.store.step_lines import ENDED_LINE, VALIDATED_LINE

EPOCH_LINE = "epoch"
"""Kind of the lines that sum up an epoch."""


def line_text(line: Mapping[str, Any]) -> str | None:
    """Returns what a line of the ranks says of an epoch, evaluation or end; or None."""
    texts = {EPOCH_LINE: epoch_text, VALIDATED_LINE: evaluation_text, ENDED_LINE: _once}
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


def evaluation_text(line: Mapping[str, Any]) -> str:
    """Returns ``evaluated after step 12: top1 0.93, loss 0.21, the best so far``."""
    names = dict.fromkeys((line["metric"], "loss"))
    words = [f"{name} {line[name]:.4g}" for name in names if line.get(name) is not None]
    words += ["the best so far"] if line["better"] else []
    return f"evaluated after step {line['step'] + 1}: {', '.join(words) or 'nothing finite'}"


def _once(line: Mapping[str, Any]) -> str | None:
    # Every rank writes this line; it is printed once.
    return ended_text(line) if line.get("rank") == 0 else None
