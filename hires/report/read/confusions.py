"""Reads the confusion matrix of an evaluation: how often each class was taken for which."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hires.core.store import file_names, reading
from hires.core.store.reading import Note, text
from hires.report.read.plain_values import count, dicts

_MOST = 64
"""Letters of the name of a class."""


class Confusion(NamedTuple):
    """Counts of images or pixels: a row for each class, a column for each predicted one."""

    names: list[str]
    counts: list[list[int]]


def confusion_in(attempt: Path, notes: list[Note] | None = None) -> Confusion | None:
    """Returns the confusion matrix in the folder of an attempt.

    None: it evaluated nothing, or images, or more classes than a matrix is kept for, or the file is
    damaged, which ``notes`` say.
    """
    notes = [] if notes is None else notes
    held = reading.read_json(attempt / file_names.EVALUATION, notes)
    rows = held.get("confusion")
    if not isinstance(rows, list) or not rows:
        return None
    counts = [[count(cell) for cell in row] if isinstance(row, list) else [] for row in rows]
    known = [[cell for cell in row if cell is not None] for row in counts]
    names = [
        text(one.get("name"), _MOST) or str(n) for n, one in enumerate(dicts(held.get("classes")))
    ]
    if {len(names), *map(len, known)} != {len(rows)}:
        place = f"{attempt.parent.name}/{file_names.EVALUATION}"
        notes.append(Note(place, "the confusion matrix is damaged"))
        return None
    return Confusion(names, known)
