"""Declares the columns that tables, frames, files and pages share, and the table made of them.

A column with ``of`` reads its value from a record, in which a value of the wrong type is missing.
It appears in the tables of a run, in the frames and their exports, and in every form of a report.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hires.core.store.reading import text
from hires.core.text_table import aligned, spreadsheet_text
from hires.core.units import MIB
from hires.report.read.plain_values import count, dicts, dig, number, value_text

Cell = str | int | float | None
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its name in CSV, its heading, and how its numbers are shown."""

    key: str
    title: str
    unit: str = ""
    factor: float = 1.0  # numbers are shown multiplied by it: bytes in CSV are MiB on screen
    digits: int | None = None  # decimals that are shown; None: a text
    of: Callable[[Row], Cell] | None = field(default=None, compare=False)
    """Reads the value from a record, or from a rank's entry in it."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    @property
    def numeric(self) -> bool:
        """Whether the cells are numbers, set flush right."""
        return self.digits is not None

    def text(self, cell: Cell) -> str:
        """Returns a cell as it is shown; ``-`` for a missing value."""
        if cell is None:
            return "-"
        if self.digits is None or isinstance(cell, str):
            return str(cell)
        return f"{cell * self.factor:.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain values."""

    name: str  # file name without its ending
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = ()
    caption: str = ""
    missing: str = ""  # what is shown instead of a table without rows
    optional: Sequence[str] = ()  # columns that go if no row fills them
    frame: Any = field(default=None, compare=False)
    """The same rows and columns with types, as a DataFrame; None where it is not needed."""

    def trimmed(self) -> Table:
        """Returns the table without the optional columns that no row fills."""
        if not self.optional or not self.rows:
            return self
        filled = [any(cell is not None for cell in cells) for cells in zip(*self.rows, strict=True)]
        wanted = [
            place
            for place, column in enumerate(self.columns)
            if filled[place] or column.key not in self.optional
        ]
        rows = [[row[place] for place in wanted] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in wanted], rows=rows)

    def text_rows(self) -> list[list[str]]:
        """Returns the rows as they are shown."""
        texts = [column.text for column in self.columns]
        return [[text(c) for text, c in zip(texts, row, strict=True)] for row in self.rows]

    def mapped(self, change: Callable[[str], str]) -> Table:
        """Returns a table whose texts were changed."""
        rows = [[change(c) if isinstance(c, str) else c for c in row] for row in self.rows]
        return replace(self, rows=rows)

    def to_csv(self) -> str:
        """Returns the table as CSV: names of columns, then plain values; missing ones are empty."""
        data = io.StringIO()
        writer = csv.writer(data, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows(self.rows)
        return data.getvalue()

    def to_markdown(self) -> str:
        """Returns the table as Markdown, aligned so that it is readable as plain text."""
        heads = [column.heading for column in self.columns]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.text_rows()]
        widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
        sides = "".join("r" if column.numeric else "l" for column in self.columns)
        ends = sides.translate({ord("r"): ":", ord("l"): "-"})
        rule = ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)]
        cells = [(*row, "") for row in (heads, rule, *rows)]  # the last one ends each line in |
        lines = aligned(cells, f"{sides}l", " | ")
        return f"## {self.title}\n\n" + "".join(f"| {line}\n" for line in lines)


def safe_csv(table: Table) -> str:
    """Returns a table as CSV; a text that a spreadsheet would compute gets an apostrophe."""
    return table.mapped(spreadsheet_text).to_csv()


def table_of(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    missing: str = "",
    optional: Sequence[str] = (),
) -> Table:
    """Returns a table with some columns of some rows."""
    cells = [[row.get(column.key) for column in columns] for row in rows]
    return Table(name, title, columns, cells, missing=missing, optional=optional)


def keys(*groups: Iterable[Column]) -> tuple[str, ...]:
    """Returns the names of columns in CSV and frames."""
    return tuple(column.key for group in groups for column in group)


def values(columns: Iterable[Column], record: Row) -> Row:
    """Returns the values of columns that read them from a record."""
    return {column.key: column.of(record) for column in columns if column.of is not None}


def texts(**titles: str) -> tuple[Column, ...]:
    """Returns columns of text by their names."""
    return tuple(Column(key, title) for key, title in titles.items())


def place_text(value: Any) -> str | None:
    """Returns a rank's stage or tile, down and up, as ``0 / 1``, ``0,1`` or ``none / 1``."""
    places = value if isinstance(value, list) else [value]
    if all(place is None for place in places) or len(places) > 2:
        return None
    # A direction that it has no part of is "none": a hyphen would begin a formula.
    return " / ".join("none" if p is None else value_text(p).strip("[]") for p in places)


def memory_rows(record: Row) -> list[Row]:
    """Returns one row a rank: its place in the layout, and its memory in bytes."""
    rows = [values(MEMORY, entry) for entry in dicts(record.get("memory"))]
    if record.get("samples") == []:  # before the first step gradients and optimiser are unknown
        for row in rows:
            row |= {key: row[key] or None for key in ("grads_bytes", "optimizer_bytes")}
    return rows


def _read(kind: Callable[[Any], Cell], *path: str) -> Callable[[Row], Cell]:
    return lambda record: kind(dig(record, *path))


def _image(record: Row) -> Cell:
    image = record.get("image")
    return "x".join(value_text(n) for n in image) if isinstance(image, list) else None


def _error_percent(entry: Row) -> Cell:
    measured, predicted = count(entry.get("peak_bytes")), count(entry.get("predicted_bytes"))
    return 100 * (predicted / measured - 1) if measured and predicted else None


def _mib(key: str, title: str) -> Column:
    return Column(key, title, "MiB", 1 / MIB, 1, _read(count, key))


def class_rows(record: Row) -> list[Row]:
    """Returns one row a class of an evaluation."""
    return [values(PER_CLASS, entry) for entry in dicts(dig(record, "evaluation", "classes"))]


def validation_rows(record: Row) -> list[Row]:
    """Returns the best and the last evaluation in the middle of a training."""
    rows: list[Row] = []
    for name in ("best", "last"):
        facts, step = (
            dig(record, "validation", name),
            count(dig(record, "validation", name, "step")),
        )
        if isinstance(facts, dict) and step is not None:
            named = f"{name} {text(dig(record, 'validation', 'metric'), 20)}"
            shown = {"name": named if name == "best" else name, "done": step + 1}
            rows.append(values(VALIDATION, {**shown, "evaluation": facts}))
    return rows


def _with_interval(
    key: str, title: str, unit: str = "%", factor: float = 100.0, digits: int = 2
) -> tuple[Column, ...]:
    """Returns the columns of a number of an evaluation and of the ends of its 95 % interval."""

    def end_of(place: int) -> Callable[[Row], Cell]:
        def read(record: Row) -> Cell:
            ends = dig(record, "evaluation", f"{key}_ci95")
            return number(ends[place]) if isinstance(ends, list) and len(ends) == 2 else None

        return read

    how = unit, factor, digits
    return (
        Column(key, title, *how, _read(number, "evaluation", key)),
        Column(f"{key}_low", "95 % from", *how, end_of(0)),
        Column(f"{key}_high", "to", *how, end_of(1)),
    )


def _share(key: str, title: str) -> Column:
    return Column(key, title, "%", 100.0, 2, _read(number, "evaluation", key))


CAMPAIGN = Column("campaign", "campaign")
RUN = Column("run", "run")
ATTEMPT = Column("attempt", "attempt", digits=0)
RANKS = Column("ranks", "ranks", digits=0)
POINT = (
    Column("model", "model", of=_read(text, "model")),
    Column("image", "image", of=_image),
    Column("layout", "layout", of=_read(text, "layout")),
    Column("precision", "precision", of=_read(text, "precision")),
)


QUANT = Column("quant", "quant")
"""Keys of ``quant`` that a run in 8 bits sets, as ``linear=dynamic``."""


def _seconds_per_megapixel(record: Row) -> Cell:
    """Returns the median time of a step over the millions of pixels of its images."""
    step_s = number(dig(record, "throughput", "step_s", "median"))
    images, size = count(record.get("images_per_step")), record.get("image")
    if step_s is None or not images or not isinstance(size, list) or len(size) != 2:
        return None
    height, width = map(number, size)
    return step_s / (images * height * width / 1e6) if height and width else None


_PARTS = ("median", "p10", "p90")
RATES = tuple(
    Column(f"img_per_s_{p}", p, "img/s", digits=2, of=_read(number, "throughput", "img_per_s", p))
    for p in _PARTS
)
STEP_TIMES = tuple(
    Column(f"step_s_{p}", f"step {p}", "s", digits=4, of=_read(number, "throughput", "step_s", p))
    for p in _PARTS
)
SAMPLES = Column("samples", "samples", digits=0, of=_read(count, "throughput", "samples"))
SPEED = (*RATES, *STEP_TIMES, SAMPLES)  # the throughput of a run or attempt
THROUGHPUT = (
    *POINT,
    Column("world", "ranks", digits=0, of=_read(count, "world")),
    Column("images_per_step", "images/step", digits=0, of=_read(count, "images_per_step")),
    *SPEED,
)
"""What was measured in a record, and how fast it was."""
ACCURACY = (
    Column("images", "images", digits=0, of=_read(count, "evaluation", "images")),
    *_with_interval("top1", "top-1"),
    _share("top5", "top-5"),
    _share("mean_recall", "recall"),
    *_with_interval("mean_iou", "IoU"),
    *_with_interval("mean_dice", "Dice"),
    *_with_interval("psnr", "PSNR", "dB", 1.0, 3),
    *_with_interval("ssim", "SSIM", "", 1.0, 4),
    Column("loss", "loss", digits=4, of=_read(number, "evaluation", "loss")),
    Column("not_finite", "not finite", digits=0, of=_read(count, "evaluation", "not_finite")),
)
"""What a pass over a data set counted: means over classes are of those that occur."""
VALIDATION = (
    Column("evaluation", "evaluation", of=_read(text, "name")),
    Column("done", "after step", digits=0, of=_read(count, "done")),
    *ACCURACY,
)
"""An evaluation in the middle of a training."""
PREDICTION = (
    Column("predicted", "images", digits=0, of=_read(count, "prediction", "images")),
    Column("kind", "of", of=_read(text, "prediction", "kind")),
    Column("reduce", "reduce", of=_read(text, "prediction", "reduce")),
    Column("not_finite", "not finite", digits=0, of=_read(count, "prediction", "not_finite")),
    Column("s_per_mp", "time per megapixel", "s/MP", digits=4, of=_seconds_per_megapixel),
    Column("table", "table", of=_read(text, "prediction", "table")),
)
"""What a pass over a data set predicted, and the table of it in the folder of the run."""
PER_CLASS = (
    Column("class", "class", digits=0, of=_read(count, "class")),
    Column("name", "name", of=_read(text, "name")),
    Column("count", "count", digits=0, of=_read(count, "count")),
    *(
        Column(key, title, "%", 100.0, 2, _read(number, key))
        for key, title in (
            ("precision", "precision"), ("recall", "recall"), ("iou", "IoU"), ("dice", "Dice"),
        )
    ),
)  # fmt: skip
MEMORY = (
    Column("rank", "rank", digits=0, of=_read(count, "rank")),
    Column("replica", "replica", digits=0, of=_read(count, "replica")),
    Column("stage", "stage", of=lambda entry: place_text(entry.get("stage"))),
    Column("tile", "tile", of=lambda entry: place_text(entry.get("tile"))),
    _mib("peak_bytes", "peak"),
    _mib("predicted_bytes", "predicted"),
    Column("error_percent", "error", "%", digits=1, of=_error_percent),
    Column("source", "measured by", of=lambda entry: text(entry.get("source"), 30)),
    _mib("params_bytes", "parameters"),
    _mib("grads_bytes", "gradients"),
    _mib("optimizer_bytes", "optimiser"),
)
"""The memory of a rank."""
