"""Builds the tables of a run from its record, and writes them into the run's folder.

CSV holds plain numbers in bytes and seconds; Markdown and the screen hold the same, rounded, with
units in the headings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store import records
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.core.store.reading import text
from hires.report.columns import MEMORY, POINT, SPEED, Column, Table, memory_rows, table_of, values
from hires.report.load.plain_values import count, value_text

_THROUGHPUT = (
    *POINT,
    Column("world", "ranks", digits=0, of=lambda record: count(record.get("world"))),
    Column(
        "images_per_step", "images/step", digits=0,
        of=lambda record: count(record.get("images_per_step")),
    ),
    *SPEED,
)  # fmt: skip


def throughput_table(record: dict[str, Any]) -> Table:
    """Returns one row: images per second and step time of the steps that count."""
    image = record.get("image")
    row = {key: text(record.get(key)) for key in ("model", "layout", "precision")}
    row["image"] = "x".join(value_text(n) for n in image) if isinstance(image, list) else None
    row |= values(_THROUGHPUT, record)
    return table_of("throughput", "Throughput", _THROUGHPUT, [row])


def memory_table(record: dict[str, Any]) -> Table:
    """Returns one row per rank: its place in the layout, and its memory in bytes."""
    return table_of("memory", "Memory", MEMORY, memory_rows(record))


def tables(record: dict[str, Any]) -> list[Table]:
    """Returns all tables of a record."""
    return [throughput_table(record), memory_table(record)]


def write(run_dir: StrPath, record: dict[str, Any]) -> list[Path]:
    """Writes the tables of a complete run into its folder, and returns the files.

    A run that is not done gets none, because a table looks complete.

    Raises:
        RunError: a file cannot be written.
    """
    return write_tables(run_dir, tables(record)) if record["state"] == "done" else []


def write_tables(folder: StrPath, held: Iterable[Table]) -> list[Path]:
    """Writes tables as CSV and Markdown, and returns the files.

    Raises:
        RunError: a file cannot be written.
    """
    files = []
    for table in held:
        for ending, data in (("csv", table.to_csv()), ("md", table.to_markdown())):
            files.append(Path(folder) / f"{table.name}.{ending}")
            write_atomically(files[-1], data)
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
    sys.stdout.write("\n".join(table.to_markdown() for table in tables(record)))
    return 0
