"""The record of a run with types: what ``record.json`` holds, and the columns of its numbers.

A number that a field describes is a column of every table, frame and file.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hires.core.evaluation_summary import METRICS
from hires.core.units import MIB
from hires.report.columns import Column, Row, value_text
from hires.report.recorded_messages import RecordedMessages

T = TypeVar("T")


def _column(title: str, unit: str = "", factor: float = 1.0, digits: int | None = None) -> Any:
    """Returns an optional field with a column; texts have no ``digits``."""
    columns = {"": Column("", title, unit, factor, digits)}
    return field(default=None, metadata={"columns": columns})


def _count(title: str) -> Any:
    return _column(title, digits=0)


def _mib(title: str) -> Any:
    return _column(title, "MiB", 1 / MIB, 1)


def _share(title: str) -> Any:
    return _column(title, "%", 100.0, 2)


def _parts(titles: dict[str, str], unit: str, factor: float, digits: int) -> Any:
    """Returns an optional field of several numbers, with a column for each by its title."""
    columns = {part: Column("", title, unit, factor, digits) for part, title in titles.items()}
    return field(default=None, metadata={"columns": columns})


def _spread(before: str, unit: str, digits: int) -> Any:
    return _parts({part: f"{before}{part}" for part in _PARTS}, unit, 1.0, digits)


_PARTS = ("median", "p10", "p90")
Interval = tuple[float, float]


@dataclass
class Spread:
    """Median, 10th and 90th percentile of some numbers."""

    median: float
    p10: float
    p90: float


@dataclass
class TimedStep:
    """A step: its number, its seconds, or why it does not count."""

    step: int
    step_s: float = math.nan
    why: str = ""


@dataclass
class RecordedThroughput:
    """How fast an attempt was, over the steps that count."""

    img_per_s: Spread | None = _spread("", "img/s", 2)
    step_s: Spread | None = _spread("step ", "s", 4)
    samples: int | None = _count("samples")
    discarded: list[TimedStep] = field(default_factory=list)


@dataclass
class RecordedLoss:
    """The mean loss of the first and the last step; null if it is not finite."""

    first: float | None = None
    last: float | None = None
    finite: bool | None = None


@dataclass
class RecordedClass:
    """What an evaluation counted of one class."""

    class_: int | None = _count("class")
    name: str | None = _column("name")
    count: int | None = _count("count")
    precision: float | None = _share("precision")
    recall: float | None = _share("recall")
    iou: float | None = _share("IoU")
    dice: float | None = _share("Dice")
    f1: float | None = _share("F1")


def _with_metrics(kind: type[T]) -> type[T]:
    """Adds a field for each metric to a class, and for its interval; makes it a dataclass."""
    for name, metric in ((name, METRICS[name]) for name in METRICS):
        look = metric.unit, metric.factor, metric.digits
        fields = {name: ("float | None", _column(metric.title, *look))}
        if metric.has_interval:
            ends = _parts({"low": "95 % from", "high": "to"}, *look)
            fields[f"{name}_ci95"] = "Interval | None", ends
        for key, (type_words, made) in fields.items():
            kind.__annotations__[key] = type_words
            setattr(kind, key, made)
    return dataclass(kind)


@_with_metrics
class RecordedEvaluation:
    """What a pass over a data set counted: means over classes are of those that occur."""

    images: int | None = _count("images")
    loss: float | None = _column("loss", digits=4)
    not_finite: int | None = _count("not finite")
    classes: list[RecordedClass] = field(default_factory=list)
    step: int | None = None
    """Of a training, in whose middle it was."""


@dataclass
class RecordedValidation:
    """The evaluations in the middle of a training."""

    metric: str | None = _column("judged by")
    ended_early: int | None = _count("ended early at")
    patience: int | None = None
    best: RecordedEvaluation | None = None
    last: RecordedEvaluation | None = None


@dataclass
class RecordedMap:
    """What a map of a prediction is."""

    channels: int
    dtype: str
    axes: str
    classes: list[str] = field(default_factory=list)


@dataclass
class RecordedPrediction:
    """What a pass over a data set predicted, and the table of it in the folder of the run."""

    images: int | None = _count("images")
    kind: str | None = _column("of")
    reduce: str | None = _column("reduce")
    not_finite: int | None = _count("not finite")
    not_predicted: int | None = _count("not predicted")
    table: str | None = _column("table")
    folder: str | None = None
    map: RecordedMap | None = None


@dataclass
class RecordedRank:
    """A rank: its place in the layout, and its memory in bytes."""

    rank: int = field(metadata={"columns": {"": Column("", "rank", digits=0)}})
    replica: int | None = _count("replica")
    stage: Any = _column("stage")
    tile: Any = _column("tile")
    peak_bytes: int | None = _mib("peak")
    predicted_bytes: int | None = _mib("predicted")
    error_percent: float | None = _column("error", "%", digits=1)
    """By how much more was predicted than measured."""
    source: str | None = _column("measured by")
    params_bytes: int | None = _mib("parameters")
    grads_bytes: int | None = _mib("gradients")
    optimizer_bytes: int | None = _mib("optimiser")

    def __post_init__(self) -> None:
        measured, predicted = self.peak_bytes, self.predicted_bytes
        self.error_percent = 100 * (predicted / measured - 1) if measured and predicted else None
        self.stage, self.tile = _place(self.stage), _place(self.tile)


@dataclass
class PlannedMessages:
    """What a step of the plan sends over all ranks."""

    messages: int | None = None
    bytes: int | None = None


@dataclass
class RecordedHardware:
    """The machine of rank 0."""

    cpu: str | None = None
    cores: int | None = None
    memory: int | None = None


@dataclass
class BoundRank:
    """Where a rank ran."""

    host: str | None = None
    cores: list[int] | None = None
    devices: str | None = None


@dataclass
class RecordedProvenance:
    """Code, versions and machine."""

    git: str | None = None
    hires: str | None = None
    torch: str | None = None
    python: str | None = None
    host: str | None = None
    hardware: RecordedHardware = field(default_factory=RecordedHardware)
    started: str | None = None
    ended: str | None = None
    ranks: list[BoundRank] = field(default_factory=list)


@dataclass
class BeganAt:
    """The checkpoint at which an attempt began."""

    step: int
    checkpoint: str | None = None
    attempt: int | None = None


@dataclass
class ContinuedRun:
    """A run in whose checkpoint another one began, and what it had otherwise."""

    run: str
    step: int
    differs: Any = None


@dataclass
class RunRecord:
    """All numbers of an attempt, or of the run; without a state there is none."""

    state: str | None = None
    cause: str | None = None
    reason: str | None = None
    attempt: int | None = None
    throughput: RecordedThroughput = field(default_factory=RecordedThroughput)
    samples: list[TimedStep] = field(default_factory=list)
    resumed: BeganAt | None = None
    lineage: list[ContinuedRun] = field(default_factory=list)
    loss: RecordedLoss = field(default_factory=RecordedLoss)
    unlabelled_microbatches: int | None = None
    failed_saves: list[int] = field(default_factory=list)
    skipped_steps: int | None = None
    loss_scale: float | None = None
    evaluation: RecordedEvaluation | None = None
    prediction: RecordedPrediction | None = None
    validation: RecordedValidation | None = None
    memory: list[RecordedRank] = field(default_factory=list)
    messages: PlannedMessages = field(default_factory=PlannedMessages)
    comm: RecordedMessages | None = None
    world: int | None = None
    images_per_step: int | None = None
    precision: str | None = None
    compiled: bool | None = None
    layout: str | None = None
    model: str | None = None
    image: tuple[int, int] | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    provenance: RecordedProvenance | None = None
    reproduce: str | None = None

    def __post_init__(self) -> None:
        if not self.samples:  # before the first step gradients and optimiser are unknown
            for rank in self.memory:
                rank.grads_bytes = rank.grads_bytes or None
                rank.optimizer_bytes = rank.optimizer_bytes or None

    @property
    def discarded(self) -> set[int]:
        """The steps that do not count: warm-up, and what else was discarded."""
        return {entry.step for entry in self.throughput.discarded}

    @property
    def counted_s(self) -> list[float]:
        """The seconds of the steps that count, in their order."""
        discarded = self.discarded
        return [s.step_s for s in self.samples if s.step not in discarded and s.step_s > 0]

    @property
    def img_per_s(self) -> float | None:
        """Images per second of the median step."""
        return None if self.throughput.img_per_s is None else self.throughput.img_per_s.median

    @property
    def top1(self) -> float | None:
        """Share of the images or pixels of an evaluation whose class was found."""
        return getattr(self.evaluation, "top1", None)

    @property
    def best_validation(self) -> float | None:
        """The number by which the best evaluation in the middle of a training is judged."""
        held = self.validation
        return None if held is None else getattr(held.best, held.metric or "", None)

    @property
    def peak_bytes(self) -> int | None:
        """Memory of the rank with the highest peak."""
        return max((rank.peak_bytes for rank in self.memory if rank.peak_bytes), default=None)

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted memory of the rank with the highest predicted peak."""
        predicted = (rank.predicted_bytes for rank in self.memory if rank.predicted_bytes)
        return max(predicted, default=None)


def columns_of(kind: type) -> tuple[Column, ...]:
    """Returns the columns of the fields of a part of a record."""
    return tuple(
        dataclasses.replace(column, key=_key(one.name, part))
        for one in dataclasses.fields(kind)
        for part, column in one.metadata.get("columns", {}).items()
    )


def cells_of(part_of_record: Any) -> Row:
    """Returns the values of these columns; None where one is missing."""
    cells: Row = {}
    for one in dataclasses.fields(part_of_record):
        value, parts = getattr(part_of_record, one.name), one.metadata.get("columns", {})
        for place, part in enumerate(parts):
            cell = value[place] if isinstance(value, tuple) else value
            cell = getattr(value, part) if isinstance(value, Spread) else cell
            cells[_key(one.name, part)] = cell
    return cells


def _key(name: str, part: str) -> str:
    return f"{name.removesuffix('_ci95')}_{part}" if part else name.rstrip("_")


def _place(value: Any) -> str | None:
    """Returns a rank's stage or tile, down and up, as ``0 / 1``, ``0,1`` or ``none / 1``."""
    places = value if isinstance(value, list) else [value]
    if all(place is None for place in places):
        return None
    # A direction that it has no part of is "none": a hyphen would begin a formula.
    return " / ".join("none" if p is None else value_text(p).strip("[]") for p in places)
