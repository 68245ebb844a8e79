"""What do many runs say, without opening every folder? The index tells, and folders fill gaps.

A line counts if the attempt that it is of is still the last one of its folder. All others are read
in the folder, so a missing, torn or old index costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.store import reading, run_index
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_numbers
from hires.core.store.reading import Note
from hires.report.load.plain_values import count
from hires.report.load.runs import Run, Values, read_run

Lines = dict[tuple[str, str], dict[int, Values]]
"""Lines of the index by campaign and run, then by attempt."""


@dataclass
class Listed:
    """Some runs, each without its samples, ranks and messages."""

    runs: list[Run] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def runs_of(results: Path, paths: Sequence[Path]) -> Listed:
    """Returns what the index and, where it falls short, the folders say of some runs.

    Args:
        results: folder of all campaigns, which holds the index.
        paths: run folders.
    """
    listed = Listed()
    lines = _read(results / run_index.FILE, listed.notes)
    missing = 0
    for path in paths:
        own = lines.get((path.parent.name, path.name), {})
        run = _from_lines(path, attempt_numbers(path), own)
        if run is None:
            run = read_run(path)
            missing += bool(run.last and run.last.exit)
        listed.runs.append(run)
    if missing:
        told = "1 run that has ended is" if missing == 1 else f"{missing} runs that have ended are"
        text = f"{told} not in the index and were read in their folders; `hires index` adds them"
        listed.notes.append(Note(run_index.FILE, text))
    return listed


def rebuild(results: Path, paths: Sequence[Path]) -> tuple[int, list[Note]]:
    """Writes the index anew from run folders.

    Args:
        results: folder of all campaigns.
        paths: all run folders.

    Returns:
        How many attempts it holds, and what could not be read.

    Raises:
        RunError: it cannot be written.
    """
    since = run_index.mark(results)
    lines: list[Values] = []
    notes: list[Note] = []
    for path in paths:
        run = read_run(path)
        notes += run.notes
        lines += [
            run_index.entry(path, attempt.number, run.config, _record(run, attempt), attempt.exit)
            for attempt in run.attempts
            if attempt.exit
        ]
    run_index.replace(results, lines, since)
    return len(lines), notes


def _read(path: Path, notes: list[Note]) -> Lines:
    """Returns the lines of an index; of the same attempt the last one."""
    found: Lines = {}
    for line in reading.read_lines(path, notes):
        attempt = count(line.get("attempt"))
        if line.get("schema") == run_index.SCHEMA and attempt is not None:
            key = (str(line.get("campaign")), str(line.get("run")))
            found.setdefault(key, {})[attempt] = line
    return found


def _from_lines(path: Path, numbers: Sequence[int], lines: dict[int, Values]) -> Run | None:
    """Returns a run as the index knows it; None if its folder must be asked."""
    if not numbers or numbers[-1] not in lines:
        return None
    attempts = [_attempt(path, number, lines[number]) for number in numbers if number in lines]
    last, config = attempts[-1], lines[numbers[-1]].get("config")
    done = [attempt for attempt in attempts if attempt.record.get("state") == "done"]
    if not isinstance(config, dict) or (last not in done and len(attempts) < len(numbers)):
        return None  # an attempt that the index does not know may be the one that completed it
    return Run(path, config, attempts, (done or [last])[-1].record)


def _attempt(path: Path, number: int, line: Values) -> Attempt:
    """Returns an attempt as its line tells it."""
    held = {key: line.get(key) for key in ("exit", "record")}
    values = {key: value if isinstance(value, dict) else {} for key, value in held.items()}
    return Attempt(path, number, held={"env": {}, **values})


def _record(run: Run, attempt: Attempt) -> dict[str, Any]:
    """Returns the record of an attempt; a run of before attempts kept their own has one."""
    if not attempt.record and len(run.attempts) == 1:
        return run.record
    return attempt.record
