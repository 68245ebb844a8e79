"""Compares what two evaluations predicted for the same images."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.evaluation_summary import paired_difference, wilson
from hires.core.store import file_names, reading
from hires.core.store.reading import Note, Values
from hires.report.read.plain_values import dig
from hires.report.read.runs import Run


class SamePredictions(NamedTuple):
    """For how many images two evaluations predict the same class, and how often one is right."""

    same: int
    images: int
    gained: int
    """Images for which only the first is right."""
    lost: int
    """Images for which only the second is right."""

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.same / self.images

    @property
    def ci95(self) -> tuple[float, float]:
        """Between which shares it lies with 95 % confidence."""
        low, high = wilson(self.same, self.images) or (0.0, 1.0)
        return low, high

    @property
    def difference(self) -> float:
        """Accuracy of the first less that of the second, from -1 to 1."""
        return (self.gained - self.lost) / self.images

    @property
    def difference_ci95(self) -> tuple[float, float]:
        """Between which differences it lies with 95 % confidence."""
        return paired_difference(self.gained, self.lost, self.images) or (-1.0, 1.0)


def evaluated(run: Run) -> bool:
    """Whether a run is a complete evaluation."""
    return run.end[0] == "done" and isinstance(run.record.get("evaluation"), dict)


def agreement(a: Run, b: Run) -> SamePredictions | None:
    """Returns how two evaluations agree; None: of other images, or no classes of images.

    Images are the same if names and classes of all are, wherever the data lay.
    """
    ours, theirs = (_predicted(run.shown.folder) for run in (a, b))
    if ours is None or theirs is None or ours[0] != theirs[0] or not ours[1]:
        return None
    both = [*zip(ours[1], theirs[1], (label for _, label in ours[0]), strict=True)]
    return SamePredictions(
        sum(x == y for x, y, _ in both),
        len(both),
        gained=sum(x == label != y for x, y, label in both),
        lost=sum(y == label != x for x, y, label in both),
    )


@functools.lru_cache(maxsize=8)
def _predicted(folder: Path) -> tuple[list[Any], list[Any]] | None:
    """Returns names and classes of all images, and what was predicted for each; None: neither."""
    notes: list[Note] = []
    held: Values = reading.read_json(folder / file_names.EVALUATION, notes)
    columns = [dig(held, "samples", key) for key in ("id", "label", "predicted")]
    if not all(isinstance(column, list) for column in columns):
        return None
    names, labels, predicted = columns
    if not len(names) == len(labels) == len(predicted):
        return None
    return [*zip(names, labels, strict=True)], predicted
