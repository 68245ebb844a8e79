"""Declares the tables of evaluations and predictions, and compares what evaluations predicted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from hires.core.evaluation_summary import paired_difference, wilson
from hires.core.store import file_names, reading
from hires.core.store.reading import Note, text
from hires.report.columns import POINT, Column, Row, table, texts
from hires.report.points import KEYS_OF_RUN, quant_text
from hires.report.record import (
    RecordedClass,
    RecordedEvaluation,
    RecordedPrediction,
    RecordedValidation,
    RunRecord,
    cells_of,
    columns_of,
)
from hires.report.run_tables import QUANT, most_exact, precision_mates
from hires.report.runs import Found, Run
from hires.report.typed_values import typed

ACCURACY = columns_of(RecordedEvaluation)
_DATA = Column("data", "data")
AGREEMENT = (
    *texts(reference="beside"),
    Column("agreement", "same class", "%", 100.0, 2),
    Column("agreement_low", "95 % from", "%", 100.0, 2),
    Column("agreement_high", "to", "%", 100.0, 2),
    Column("difference", "difference", "points", 100.0, 2),
    Column("difference_low", "95 % from", "points", 100.0, 2),
    Column("difference_high", "to", "points", 100.0, 2),
)
"""``difference``: of top-1, on the same images."""


@dataclass
class Predictions:
    """What was predicted for each image of a data set, as ``evaluation.json`` has it."""

    id: list[Any]
    label: list[int]
    predicted: list[int]


@dataclass
class EvaluationFile:
    """What ``evaluation.json`` holds beside the sums that the record has, too."""

    samples: Predictions | None = None
    confusion: list[list[int]] = field(default_factory=list)
    """Counts of images or pixels: a row for each class, a column for each predicted one."""
    classes: list[RecordedClass] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        return [one.name or str(n) for n, one in enumerate(self.classes)]


def evaluation_in(attempt: Path, notes: list[Note] | None = None) -> EvaluationFile:
    """Returns what an attempt evaluated; an empty one if a note says that the file is damaged.

    Without ``notes`` that is a warning.
    """
    notes = reading.Warned() if notes is None else notes
    path = attempt / file_names.EVALUATION
    values = reading.read_json(path, notes, needed=True)
    samples = values.get("samples")
    if not isinstance(samples, dict) or "predicted" not in samples:
        values.pop("samples", None)  # of images or pixels: no class for each
    try:
        held: EvaluationFile = typed(EvaluationFile, values)
        sizes = {len(held.confusion), *map(len, held.confusion)}
        if held.confusion and sizes != {len(held.classes)}:
            raise ValueError("its confusion matrix has other classes")
    except ValueError as error:
        notes.append(reading.note(path, f"is damaged: {error}"))
        return EvaluationFile()
    return held


def evaluated(run: Run) -> bool:
    """Whether a run is a complete evaluation."""
    return run.end[0] == "done" and run.record.evaluation is not None


def agreement(a: Run, b: Run) -> Row:
    """Returns how two evaluations agree: shares with the ends of their 95 % intervals.

    Empty: of other images, or no classes of images. Images are the same if names and classes of
    all are, wherever the data lay.
    """
    ours, theirs = (_predicted(run.shown.folder) for run in (a, b))
    if ours is None or theirs is None or (ours.id, ours.label) != (theirs.id, theirs.label):
        return {}
    both = [*zip(ours.predicted, theirs.predicted, ours.label, strict=True)]
    images, same = len(both), sum(x == y for x, y, _ in both)
    if not images:
        return {}
    gained = sum(x == label != y for x, y, label in both)
    lost = sum(y == label != x for x, y, label in both)
    ends = wilson(same, images) or (0.0, 1.0)
    off = paired_difference(gained, lost, images) or (-1.0, 1.0)
    numbers = (same / images, *ends, (gained - lost) / images, *off)
    return dict(zip((column.key for column in AGREEMENT[1:]), numbers, strict=True))


@functools.lru_cache(maxsize=8)
def _predicted(folder: Path) -> Predictions | None:
    samples = evaluation_in(folder).samples
    lengths = samples and {len(samples.id), len(samples.label), len(samples.predicted)}
    return samples if lengths and len(lengths) == 1 else None


@table(
    "evaluations",
    (*POINT, QUANT, _DATA, *ACCURACY, *AGREEMENT),
    "Accuracy",
    caption="Of every evaluation: shares of images or pixels, means over the classes that occur, "
    "for how many images the class is the one that the most exact precision predicts, and top-1 "
    "less that of that precision. Intervals of shares are Wilson's, those of differences are of "
    "pairs (Bonett and Price).",
    empty="No run evaluated (task=evaluate).",
    place=6,
)
def evaluations(found: Found) -> Iterator[Row]:
    """Yields the accuracy of every evaluation, beside its most exact mate's predictions."""
    for run, mates in precision_mates(found.runs, evaluated):
        best = most_exact(run, mates)
        yield {
            **run.point,
            QUANT.key: quant_text(run),
            _DATA.key: data_label(run),
            **cells_of(run.record.evaluation),
            **({} if best is None else agreement(run, best)),
            "reference": best and best.record.precision,
        }


@table(
    "classes",
    (*POINT[:-1], *columns_of(RecordedClass)),
    "Classes",
    caption="Of every evaluation: how many images or pixels are of each class, and how many of "
    "them were found.",
    empty="No run evaluated classes (task=evaluate).",
    place=7,
)
def classes(found: Found) -> Iterator[Row]:
    """Yields one row a class of an evaluation."""
    for run in filter(evaluated, found.runs):
        for one in run.record.evaluation.classes if run.record.evaluation else ():
            yield {**run.point, **cells_of(one)}


@table(
    "validations",
    (*POINT, _DATA, *texts(evaluation="evaluation"), Column("done", "after step", digits=0),
     *ACCURACY, *columns_of(RecordedValidation)),
    "Evaluations of trainings",
    hidden=KEYS_OF_RUN,
    caption="The best and the last evaluation of every training (validate.every), on images that "
    "it did not learn from; weights=RUN/best are those of the best one. A training that ended "
    "early had no better one for validate.patience evaluations.",
    empty="No run was evaluated while it trained (validate.every).",
    place=8,
)  # fmt: skip
def validations(found: Found) -> Iterator[Row]:
    """Yields the best and the last evaluation of every training that was evaluated."""
    for run in found.runs:
        held = run.record.validation
        for name in ("best", "last") if held is not None else ():
            one: RecordedEvaluation | None = getattr(held, name)
            if held is not None and one is not None and one.step is not None:
                named = f"best {held.metric}" if name == "best" else name
                row = {**run.point, _DATA.key: data_label(run), **cells_of(held), **cells_of(one)}
                yield row | {"evaluation": named, "done": one.step + 1}


@table(
    "predictions",
    (*POINT, _DATA, *columns_of(RecordedPrediction),
     Column("s_per_mp", "time per megapixel", "s/MP", digits=4)),
    "Predictions",
    caption="What every prediction wrote: the table lies in the folder of the run, and names the "
    "file of each image where the network returns maps or images.",
    empty="No run predicted (task=predict).",
    place=9,
)  # fmt: skip
def predictions(found: Found) -> Iterator[Row]:
    """Yields what every complete prediction wrote."""
    for run in found.runs:
        record = run.record
        if run.end[0] == "done" and record.prediction is not None:
            row = {**run.point, _DATA.key: data_label(run), **cells_of(record.prediction)}
            yield row | {"s_per_mp": _seconds_per_megapixel(record)}


def data_label(run: Run) -> str:
    """Returns the data of a run in a few words, as ``digits, validation``."""
    data = run.config.get("data")
    data = data if isinstance(data, dict) else {}
    name, split, path = (text(data.get(key), 4096) for key in ("name", "split", "path"))
    if path and name != "cifar10":  # elsewhere the folder says what the images are
        name = PurePath(path).name or name
    name = text(name, 60)
    return f"{name}, {text(split, 60)}" if split not in (None, "all") else name or "?"


def _seconds_per_megapixel(record: RunRecord) -> float | None:
    """Returns the median time of a step over the millions of pixels of its images."""
    step_s, images, size = record.throughput.step_s, record.images_per_step, record.image
    if step_s is None or not images or size is None or min(size) < 1:
        return None
    return step_s.median / (images * size[0] * size[1] / 1e6)
