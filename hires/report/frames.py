"""Holds the data of many runs as pandas DataFrames, one row for each run, attempt, rank or class.

The names of columns end with units; what a run did not record is missing, never 0. Frames join by
``campaign`` and ``run`` (the name of the folder). Notes tell what of a damaged folder is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hires.core.store.file_names import StrPath
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.report import evaluations, logged_messages, run_tables  # noqa: F401  (their tables)
from hires.report.columns import TABLES, Column, Row, table_of
from hires.report.runs import Found, Run, find
from hires.report.tables import rows_of

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
