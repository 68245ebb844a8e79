"""Builds tables and pandas DataFrames of runs from their declarations, and writes them.

CSV and frames hold plain numbers in bytes and seconds; Markdown and the screen round them. The
names of columns end with units; what a run did not record is missing, never 0. Frames join by
``campaign`` and ``run`` (the name of the folder). Notes tell what of a damaged folder is left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, records
from hires.core.store.campaign import Campaign
from hires.core.store.file_names import StrPath
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.report import evaluations, logged_messages, run_tables  # noqa: F401  (their tables)
from hires.report.columns import (
    CAMPAIGN,
    KEYS,
    POINT,
    REPRODUCE,
    RUN,
    TABLES,
    Column,
    DeclaredTable,
    Row,
    Table,
    filled,
    table_of,
)
from hires.report.points import differing_keys
from hires.report.record import RunRecord
from hires.report.runs import Found, Run, find
from hires.report.typed_values import typed

if TYPE_CHECKING:  # it takes a second
    import pandas as pd

_OF_POINT = tuple(column.key for column in POINT)
OF_A_RUN: dict[str, Sequence[str]] = {
    "validations": (*_OF_POINT, "data"), "predictions": ("data",), "evaluations": ("data",),
    "classes": _OF_POINT,
    "throughput": ("task", "efficiency_percent"), "memory": _OF_POINT,
}  # fmt: skip
"""Tables in the folder of a run, each with the columns of a report that it has not."""


def rows_of(found: Found, name: str) -> list[Row]:
    """Returns the rows of a table."""
    rows = [*TABLES[name].rows(found)]
    if KEYS in TABLES[name].columns:
        for row, keys in zip(
            rows, differing_keys(rows, ("layout_keys", "other_keys")), strict=True
        ):
            row[KEYS.key] = keys or None
    return rows


def tables(found: Found) -> list[Table]:
    """Returns the tables of a report, with those columns that have a value."""
    wanted = sorted((one for one in TABLES.values() if one.empty), key=lambda one: one.place)
    return [_table(found, declared, [CAMPAIGN, RUN], [REPRODUCE]) for declared in wanted]


def tables_of_run(record: RunRecord) -> list[Table]:
    """Returns the tables of a record that have a row, as they lie in the folder of its run."""
    found = Found([Run(Path(), record=record)], last_only=True)
    made = []
    for name, without in OF_A_RUN.items():
        columns = [c for c in TABLES[name].columns if c.key not in (*without, "attempt")]
        made.append(_table(found, replace(TABLES[name], columns=columns), [], []))
    return [table for table in made if table.rows]


def campaign_tables(folder: Path, campaign: Campaign) -> list[Table]:
    """Returns the tables of a campaign that have a row, of those that a run has.

    They name a run by its hash.
    """
    found = find(path for point in campaign.points if (path := folder / point.run).is_dir())
    short = {run.name: run.short for run in found.runs}
    made = [_table(found, TABLES[name], [RUN], []) for name in OF_A_RUN]
    return [table.mapped(lambda cell: short.get(cell, cell)) for table in made if table.rows]


def _table(
    found: Found, declared: DeclaredTable, before: list[Column], behind: list[Column]
) -> Table:
    rows = rows_of(found, declared.name)
    columns = [*before, *declared.columns, *behind]
    if len({*(run.campaign for run in found.runs), *found.campaigns}) < 2:
        columns = [column for column in columns if column is not CAMPAIGN]
    table = table_of(declared.name, declared.title, columns, rows)
    table = replace(table, caption=declared.caption if behind else "", empty=declared.empty)
    return filled(table, (RUN.key, REPRODUCE.key))


def write_run_tables(run_dir: StrPath, values: dict[str, Any]) -> list[Path]:
    """Writes the tables of a run as :func:`write_tables`, but none before it is done."""
    return (
        write_tables(run_dir, tables_of_run(record_of(values))) if values["state"] == "done" else []
    )


def record_of(values: dict[str, Any]) -> RunRecord:
    """Returns a record with types; RunError: it is damaged."""
    try:
        record: RunRecord = typed(RunRecord, values)
    except ValueError as error:
        raise RunError(
            f"{file_names.RECORD} is damaged: {error}; run the experiment again"
        ) from None
    return record


def write_tables(folder: StrPath, tables: Iterable[Table]) -> list[Path]:
    """Writes tables as CSV and Markdown, and returns the files; RunError: it cannot write one."""
    files = []
    for table in tables:
        for ending, data in (("csv", table.to_csv()), ("md", table.to_markdown())):
            files.append(Path(folder) / f"{table.name}.{ending}")
            write_atomically(files[-1], data)
    return files


_OPTION = "--out DIR"
DEVICE = "device"  # source of a rank's memory in a record, if it computed on an accelerator


class Frames:
    """The data of some runs: an attribute for each table of ``columns.TABLES``."""

    def __init__(self, found: Found) -> None:
        """Frames are made when they are first asked for."""
        self.found = found

    @property
    def run_list(self) -> list[Run]:
        """The runs, in the order of the frame ``runs``."""
        return self.found.runs

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name not in TABLES:
            raise AttributeError(f"no frame is named {name!r}; they are {', '.join(TABLES)}")
        frame = _frame(*self.rows(name))
        self.__dict__[name] = frame
        return frame

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    def rows(self, name: str) -> tuple[list[Column], list[Row]]:
        """Returns the columns and rows of a frame."""
        rows, columns = rows_of(self.found, name), TABLES[name].all_columns
        if name == "configs":
            columns = [
                Column(key, key) for key in dict.fromkeys(key for row in rows for key in row)
            ]
        return columns, rows

    def all_notes(self) -> list[Note]:
        """Returns everything that could not be used, each once."""
        notes = [*self.found.notes, *(note for run in self.run_list for note in run.notes)]
        for point in plain_rows(self.points):
            if point["left_out"]:
                why = (
                    f"{point['left_out']} complete attempts of another commit or machine than "
                    f"{(point['git'] or '?')[:10]} on {point['host'] or '?'} count in no median"
                )
                notes.append(Note(f"{point['campaign']}/{point['run']}", why))
        return list(dict.fromkeys(notes))


def load(paths: Iterable[Path], campaigns: Iterable[StrPath] = ()) -> Frames:
    """Returns the frames of some run folders, and of the points that some campaigns planned."""
    return Frames(find(paths, campaigns))


def write_frames(frames: Frames, out: Path) -> list[Path]:
    """Writes all frames that have rows as CSV, and returns the files; ConfigError: it cannot."""
    make_folder(out, _OPTION)
    files = []
    for name in TABLES:
        columns, rows = frames.rows(name)
        if rows:
            files.append(out / f"{name}.csv")
            text = table_of(name, name, columns, rows).to_csv()
            write_atomically(files[-1], text, option=_OPTION)
    return files


def setting(found: Found) -> str:
    """Returns what kind of device was measured, as it stands below every figure."""
    machines = [machine for run in found.runs for machine in _machines(run)]
    numbers = sorted({cores for _, _, cores, _ in machines if cores})
    if not numbers:
        return "device not recorded"
    sources = {rank.source for run in found.runs for rank in run.record.memory} - {None}
    kinds = ["accelerator"] * (DEVICE in sources) + ["CPU"] * (sources != {DEVICE})
    cores = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
    hosts = len({host for host, *_ in machines})
    where = "1 machine" if hosts == 1 else f"{hosts} machines"
    parts = [f"{' and '.join(kinds)}, {cores} cores{'' if hosts == 1 else ' each'}, {where}"]
    crowded = max((ranks for _, ranks, cores, _ in machines if cores and ranks > cores), default=0)
    if crowded and "CPU" in kinds:
        parts.append(f"simulated ranks: up to {crowded} share the cores")
    sharing = max(shared for *_, shared in machines)
    if sharing > 1 and DEVICE in sources:
        parts.append(f"up to {sharing} ranks share one accelerator")
    return "; ".join(parts)


def plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame as plain values; None where one is missing."""
    columns = [frame[key].astype(object).where(frame[key].notna(), None) for key in frame.columns]
    cells = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(frame.columns, row, strict=True)) for row in cells]


def numeric(frame: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column as numbers; what is none is missing."""
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


def _machines(run: Run) -> Iterator[tuple[str, int, int | None, int]]:
    """Yields the machines that a run recorded: host, ranks on it, their cores, None if unknown.

    The last number is that of the ranks which share one accelerator at most, 0 if unknown.
    """
    origin = run.provenance
    by_host: dict[str, list[Any]] = {}
    for rank in origin.ranks:
        by_host.setdefault(rank.host or origin.host or "?", []).append(rank)
    if origin.host and not by_host:
        yield origin.host, run.record.world or 1, origin.hardware.cores, 0
    for name, ranks in by_host.items():
        used = {core for rank in ranks for core in rank.cores or ()}
        visible = Counter(rank.devices for rank in ranks if rank.devices)
        shares = [-(-number // len(words.split(","))) for words, number in visible.items()]
        yield name, len(ranks), len(used) or origin.hardware.cores, max(shares, default=0)


def _frame(columns: Sequence[Column], rows: list[Row]) -> pd.DataFrame:
    """Returns rows as a frame of these columns, which exist even if there is no row.

    Their types hold missing values. ``convert_dtypes`` would turn seconds that happen to be whole
    into integers.
    """
    import pandas as pd

    frame = {}
    for column in columns:
        cells = [row.get(column.key) for row in rows]
        types = {type(cell) for cell in cells if cell is not None} or {
            float if column.numeric else str
        }
        dtype = {frozenset({bool}): "boolean", frozenset({int}): "Int64"}.get(frozenset(types))
        dtype = dtype or ("Float64" if types <= {float, int} else "string")
        texts = [cell if cell is None or dtype != "string" else str(cell) for cell in cells]
        frame[column.key] = pd.array(texts, dtype=dtype)
    return pd.DataFrame(frame)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes and prints the tables of a run folder; the last line of every ``launch.sh``."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 1 or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: python -m hires.report.tables RUN_DIR\n")
        return 0 if words in (["-h"], ["--help"]) else 2
    try:
        values = records.read_record(words[0])
        if values is None:
            sys.stderr.write(f"{words[0]} holds no record.json: no attempt has ended yet\n")
            return 1
        write_run_tables(words[0], values)
        made = tables_of_run(record_of(values))
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(table.to_markdown() for table in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
