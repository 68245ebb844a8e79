"""How fast was a run, and how much memory did each rank take?

Builds the two tables of a run from its record. CSV holds plain numbers in bytes and seconds with
one name per column; Markdown and the screen hold the same, rounded, with units in the heading.
A record may be anybody's: a value of the wrong type is missing, and no text moves the cursor.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store import records
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.core.store.reading import text
from hires.core.units import MIB
from hires.report.load.plain_values import count, dicts, dig, number, spoken

Cell = str | int | float | None
NOWHERE = "none"
"""Place of a rank in a direction that it has no part of; a hyphen would begin a formula."""


@dataclass(frozen=True)
class Column:
    """One column: its name in CSV, its heading for people, and how its numbers are shown."""

    key: str
    title: str
    unit: str = ""
    factor: float = 1.0
    """A number is multiplied by it for people: bytes in CSV are MiB on screen."""
    digits: int | None = None
    """Decimals shown to people; None: as it is."""

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    @property
    def numeric(self) -> bool:
        """Whether the cells are numbers to be set flush right."""
        return self.digits is not None

    def text(self, cell: Cell) -> str:
        """Returns a cell as a person reads it; ``-`` for what is not known."""
        if cell is None:
            return "-"
        if self.digits is None or isinstance(cell, str):
            return str(cell)
        return f"{cell * self.factor:.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain values."""

    name: str
    """File name without its ending."""
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def text_rows(self) -> list[list[str]]:
        """Returns the rows as a person reads them."""
        return [
            [column.text(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


def throughput_table(record: dict[str, Any]) -> Table:
    """Returns one row: images per second and step time of the steps that count."""
    image = record.get("image")
    row: list[Cell] = [
        text(record.get("model")),
        "x".join(spoken(n) for n in image) if isinstance(image, list) else None,
        text(record.get("layout")),
        text(record.get("precision")),
        count(record.get("world")),
        count(record.get("images_per_step")),
        *_spread(dig(record, "throughput", "img_per_s")),
        *_spread(dig(record, "throughput", "step_s")),
        count(dig(record, "throughput", "samples")),
    ]
    return Table("throughput", "Throughput", _THROUGHPUT, [row])


def memory_table(record: dict[str, Any]) -> Table:
    """Returns one row per rank: where it stands in the layout, and its memory in bytes."""
    rows: list[list[Cell]] = []
    for entry in dicts(record.get("memory")):
        place: list[Cell] = [count(entry.get("rank")), count(entry.get("replica"))]
        place += [_both(entry.get("stage")), _both(entry.get("tile"))]
        facts: dict[str, Cell] = {key: count(entry.get(key)) for key in _BYTES}
        facts |= {"source": text(entry.get("source")), "error_percent": _error_percent(entry)}
        rows.append(place + [facts.get(column.key) for column in _MEMORY[4:]])
    return Table("memory", "Memory", _MEMORY, rows)


def to_csv(table: Table) -> str:
    """Returns a table as CSV: names of columns, then plain values; unknown is empty."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows(table.rows)
    return made.getvalue()


def to_markdown(table: Table) -> str:
    """Returns a table as Markdown, aligned so that it reads well as plain text too."""
    heads = [column.heading for column in table.columns]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.text_rows()]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rights = [column.numeric for column in table.columns]
    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, rights, strict=True)
    ]
    lines = [_markdown_row(cells, widths, rights) for cells in (heads, rule, *rows)]
    return f"## {table.title}\n\n" + "\n".join(lines) + "\n"


def tables(record: dict[str, Any]) -> list[Table]:
    """Returns all tables of a record."""
    return [throughput_table(record), memory_table(record)]


def write(run_dir: StrPath, record: dict[str, Any]) -> list[Path]:
    """Writes the tables of a complete run into its folder, as CSV and Markdown.

    Returns:
        The files; none if the run is not done, because a table looks complete.

    Raises:
        RunError: a file cannot be written.
    """
    if record["state"] != "done":
        return []
    files = []
    for table in tables(record):
        for ending, held in (("csv", to_csv(table)), ("md", to_markdown(table))):
            files.append(Path(run_dir) / f"{table.name}.{ending}")
            write_atomically(files[-1], held)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Writes and prints the tables of a run folder; the last line of every ``launch.sh``."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 1 or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: python -m hires.report.tables RUN_DIR\n")
        return 0 if words in (["-h"], ["--help"]) else 2
    try:
        record = records.read_record(words[0])
        if record is None:
            sys.stderr.write(f"{words[0]} holds no record.json: no attempt has ended yet\n")
            return 1
        write(words[0], record)
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(to_markdown(table) for table in tables(record)))
    return 0


def _error_percent(entry: dict[str, Any]) -> float | None:
    """Returns how far the predicted peak lies above the measured one."""
    measured, predicted = count(entry.get("peak_bytes")), count(entry.get("predicted_bytes"))
    return 100 * (predicted / measured - 1) if measured and predicted else None


def _both(places: Any) -> Cell:
    """Returns a rank's place down, and up where there are two directions; None if it has none."""
    if not isinstance(places, list) or all(place is None for place in places):
        return None
    said = [spoken(place).strip("[]") if isinstance(place, list) else place for place in places]
    if len(said) == 1:
        return said[0] if count(said[0]) is not None else spoken(said[0])
    return " / ".join(NOWHERE if p is None else spoken(p) for p in said)


def _spread(values: Any) -> list[Cell]:
    """Returns median, p10 and p90 as cells."""
    return [number(dig(values, key)) for key in ("median", "p10", "p90")]


def _markdown_row(cells: Sequence[str], widths: Sequence[int], rights: Sequence[bool]) -> str:
    """Returns one row of a Markdown table."""
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, rights, strict=True)
    ]
    return "| " + " | ".join(padded) + " |"


_THROUGHPUT = (
    Column("model", "model"),
    Column("image", "image"),
    Column("layout", "layout"),
    Column("precision", "precision"),
    Column("world", "ranks", digits=0),
    Column("images_per_step", "images/step", digits=0),
    Column("img_per_s_median", "median", "img/s", digits=2),
    Column("img_per_s_p10", "p10", "img/s", digits=2),
    Column("img_per_s_p90", "p90", "img/s", digits=2),
    Column("step_s_median", "step median", "s", digits=4),
    Column("step_s_p10", "step p10", "s", digits=4),
    Column("step_s_p90", "step p90", "s", digits=4),
    Column("samples", "samples", digits=0),
)

_MEMORY = (
    Column("rank", "rank", digits=0),
    Column("replica", "replica", digits=0),
    Column("stage", "stage", digits=0),
    Column("tile", "tile"),
    Column("peak_bytes", "peak", "MiB", 1 / MIB, 1),
    Column("predicted_bytes", "predicted", "MiB", 1 / MIB, 1),
    Column("error_percent", "error", "%", digits=1),
    Column("source", "measured by"),
    Column("params_bytes", "parameters", "MiB", 1 / MIB, 1),
    Column("grads_bytes", "gradients", "MiB", 1 / MIB, 1),
    Column("optimizer_bytes", "optimiser", "MiB", 1 / MIB, 1),
)

_BYTES = [column.key for column in _MEMORY if column.key.endswith("_bytes")]
