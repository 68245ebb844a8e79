"""Builds the tables of a run and of a campaign from records, and writes them into their folders.

CSV holds plain numbers in bytes and seconds; Markdown and the screen round them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, records, rundir
from hires.core.store.campaign import Campaign
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.report.columns import (
    ACCURACY,
    ATTEMPT,
    MEMORY,
    PER_CLASS,
    POINT,
    PREDICTION,
    QUANT,
    RUN,
    THROUGHPUT,
    VALIDATION,
    Cell,
    Column,
    Table,
    class_rows,
    keys,
    memory_rows,
    safe_csv,
    table_of,
    validation_rows,
    values,
)
from hires.report.read.evaluation_rows import AGREEMENT, evaluation_rows, with_reference
from hires.report.read.runs import Run, read_runs

_OVERRIDES = Column("overrides", "overrides")
_WITH_COLUMN = ("model", "image", "parallel", "precision", "batch")  # of the throughput's table


def tables(record: dict[str, Any]) -> list[Table]:
    """Returns the throughput of a record in one row, and its memory with a row a rank.

    Of an evaluation the accuracy stands first, in one row, and a row for each class; of a
    prediction what it wrote. Of a training its best and last evaluation stand first.
    """
    return [table.trimmed() for table in _whole_tables(record)]


def _whole_tables(record: dict[str, Any]) -> list[Table]:
    """Returns the tables of a record with all their columns."""
    made = [
        table_of("throughput", "Throughput", THROUGHPUT, [values(THROUGHPUT, record)]),
        table_of("memory", "Memory", MEMORY, memory_rows(record)),
    ]
    if rows := validation_rows(record):
        title, wanted = "Evaluations of the training", keys(VALIDATION)
        made.insert(0, table_of("validation", title, VALIDATION, rows, optional=wanted))
    if isinstance(record.get("prediction"), dict):
        row = values([*POINT, *PREDICTION], record)
        return [table_of("prediction", "Prediction", [*POINT, *PREDICTION], [row]), *made]
    if not isinstance(record.get("evaluation"), dict):
        return made
    row = values([*POINT, *ACCURACY], record)
    first = [table_of("accuracy", "Accuracy", [*POINT, *ACCURACY], [row], optional=keys(ACCURACY))]
    if classes := class_rows(record):
        first.append(table_of("classes", "Classes", PER_CLASS, classes, optional=keys(PER_CLASS)))
    return [*first, *made]


def campaign_tables(folder: Path, campaign: Campaign) -> list[Table]:
    """Returns the tables of a campaign: as many complete attempts of each point as it repeats."""
    # Overrides that not all points share are a column, unless another column shows them.
    words = [set(point.overrides) for point in campaign.points]
    shared = set.intersection(*words) if words else set()
    attempts: list[tuple[dict[Column, Cell], dict[str, Any]]] = []
    paths: list[Path] = []
    for point in campaign.points:
        own = [word for word in point.overrides if word not in shared]
        own = [word for word in own if word.partition("=")[0].lstrip("+") not in _WITH_COLUMN]
        names: dict[Column, Cell] = {RUN: point.run.rpartition("-")[2], _OVERRIDES: " ".join(own)}
        for record in done_records(folder / point.run, point.repeat):
            attempts.append(({**names, ATTEMPT: record.get("attempt")}, record))
            paths.append(folder / point.run)
    several = len({names[RUN] for names, _ in attempts}) < len(attempts)
    extra = [RUN]
    extra += [_OVERRIDES] if any(names[_OVERRIDES] for names, _ in attempts) else []
    extra += [ATTEMPT] if several else []
    joined: dict[str, Table] = {}
    for names, record in attempts:
        first = [names[column] for column in extra]
        for table in _whole_tables(record):
            above = joined[table.name].rows if table.name in joined else ()
            rows = [*above, *([*first, *cells] for cells in table.rows)]
            joined[table.name] = replace(table, columns=[*extra, *table.columns], rows=rows)
    if "accuracy" in joined:
        runs = read_runs(dict.fromkeys(paths))
        joined["accuracy"] = _with_agreement(joined["accuracy"], runs)
    return [table.trimmed() for table in joined.values()]


def _with_agreement(table: Table, runs: Sequence[Run]) -> Table:
    """Returns the accuracy of runs with how they are quantised and agree with the most exact one.

    Of a run with several attempts, the agreement stands beside the one that a report shows.
    """
    keys_of = [column.key for column in table.columns]
    shown = {run.name: run.shown.number for run in runs}
    evaluated = {
        row["run"].rpartition("-")[2]: (shown[row["run"]], row) for row in evaluation_rows(runs)
    }
    more = with_reference([QUANT, *AGREEMENT], (row["reference"] for _, row in evaluated.values()))
    rows = []
    for cells in table.rows:
        own = dict(zip(keys_of, cells, strict=True))
        attempt, row = evaluated.get(str(own[RUN.key]), (None, {}))
        if own.get(ATTEMPT.key, attempt) != attempt:
            row = {QUANT.key: row.get(QUANT.key)}
        rows.append([*cells, *(row.get(column.key) for column in more)])
    optional = (*table.optional, *keys(more))
    return replace(table, columns=[*table.columns, *more], rows=rows, optional=optional)


def done_records(run: Path, most: int) -> list[dict[str, Any]]:
    """Returns the readable records of the last ``most`` complete attempts."""
    attempts = rundir.done_attempts(run)[-most:]
    own = [_read(file_names.attempt_dir(run, attempt)) for attempt in attempts]
    return [record for record in own if record is not None]


def write(run_dir: StrPath, record: dict[str, Any]) -> list[Path]:
    """Writes the tables of a run as :func:`write_tables`, but none before it is done."""
    return write_tables(run_dir, tables(record)) if record["state"] == "done" else []


def write_tables(folder: StrPath, tables: Iterable[Table]) -> list[Path]:
    """Writes tables as CSV and Markdown, and returns the files; RunError: it cannot write one."""
    files = []
    for table in tables:
        for ending, data in (("csv", safe_csv(table)), ("md", table.to_markdown())):
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


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        return records.read_record(folder)
    except RunError:
        return None


if __name__ == "__main__":
    sys.exit(main())
