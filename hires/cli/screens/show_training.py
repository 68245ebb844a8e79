"""Shows the weights of a training, why it ended early, and the confusion matrix of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hires.core.epoch_lines import ended_text
from hires.core.store import checkpoints
from hires.core.store.file_names import StrPath, attempt_dir
from hires.core.store.network_weights import BEST
from hires.core.store.reading import text
from hires.report.columns import Cell, Column, Table
from hires.report.read.confusions import confusion_in
from hires.report.read.plain_values import count, dig

MOST_SHOWN = 12
"""Classes up to which a screen shows a confusion matrix."""


def training_lines(record: dict[str, Any], run: StrPath) -> list[str]:
    """Returns why a training ended early, and what ``weights=`` takes of it; none of other runs."""
    lines = []
    step = count(dig(record, "validation", "ended_early"))
    if step is not None:
        facts: dict[str, Any] = {
            "step": step,
            "patience": count(dig(record, "validation", "patience")),
        }
        facts["metric"] = text(dig(record, "validation", "metric"), 20)
        lines.append(ended_text(facts))
    there, _ = checkpoints.whole_checkpoints(run)
    best = checkpoints.read_best(run)
    if best is not None and any(one.step == best.step for one in there):
        lines.append(f"weights={text(str(run))}/{BEST} are the best ones: {best_words(best)}")
    if there:
        lines.append(f"weights={text(str(run))} are those after step {there[0].step}")
    return lines


def best_words(best: checkpoints.Best) -> str:
    """Returns ``top1 0.93 after step 12``."""
    return f"{text(best.metric, 20)} {best.value:.4g} after step {best.step}"


def confusion_table(record: dict[str, Any], run: StrPath) -> Table | None:
    """Returns the confusion matrix of an evaluation; None: there is none, or it is too large."""
    attempt = count(record.get("attempt"))
    if attempt is None or not isinstance(record.get("evaluation"), dict):
        return None
    found = confusion_in(attempt_dir(Path(run), attempt))
    if found is None or len(found.names) > MOST_SHOWN:
        return None
    columns = [Column("class", "class")]
    columns += [Column(f"as{n}", name, digits=0) for n, name in enumerate(found.names)]
    rows: list[list[Cell]] = [
        [name, *own] for name, own in zip(found.names, found.counts, strict=True)
    ]
    title = "Confusion: a row for each class, a column for what was predicted"
    return Table("confusion", title, columns, rows)
