"""Reads many runs from the index of a results folder, and from their folders where it has gaps.

A line counts if it is of the latest attempt in its folder. All other runs are read in their
folders, so a missing, torn or old index costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.store import file_names, reading, run_index
from hires.core.store.attempts import Attempt
from hires.core.store.reading import Note, Values
from hires.report.load.plain_values import count
from hires.report.load.runs import Run, read_run


@dataclass
class Listed:
    """Some runs, each without its samples, ranks and messages."""

    runs: list[Run] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def runs_of(results: Path, paths: Sequence[Path]) -> Listed:
    """Returns some runs from the index and, where it has gaps, from their folders.

    Args:
        results: folder of all campaigns, which holds the index.
        paths: run folders.
    """
    listed = Listed()
    lines: dict[tuple[str, str], dict[int, Values]] = {}
    for line in reading.read_lines(results / run_index.FILE, listed.notes):
        attempt = count(line.get("attempt"))
        if line.get("schema") == run_index.SCHEMA and attempt is not None:
            key = (str(line.get("campaign")), str(line.get("run")))
            lines.setdefault(key, {})[attempt] = line  # of the same attempt the last one
    missing = 0
    for path in paths:
        run = _from_lines(path, lines.get((path.parent.name, path.name), {}))
        if run is None:
            run = read_run(path)
            missing += bool(run.last and run.last.exit)
        listed.runs.append(run)
    if missing:
        runs = "1 run that has ended is" if missing == 1 else f"{missing} runs that have ended are"
        text = f"{runs} not in the index and were read in their folders; `hires index` adds them"
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
        for attempt in run.attempts:
            record = attempt.record
            if not record and len(run.attempts) == 1:
                record = run.record  # an old run, whose attempt has no record of its own
            if attempt.exit:
                end = attempt.exit
                lines.append(run_index.entry(path, attempt.number, run.config, record, end))
        notes += run.notes
    run_index.replace(results, lines, since)
    return len(lines), notes


def _from_lines(path: Path, lines: dict[int, Values]) -> Run | None:
    """Returns a run from its lines of the index; None if its folder must be read."""
    numbers = file_names.attempt_numbers(path)
    if not numbers or numbers[-1] not in lines:
        return None
    attempts = [_attempt(path, number, lines[number]) for number in numbers if number in lines]
    last, config = attempts[-1], lines[numbers[-1]].get("config")
    done = [attempt for attempt in attempts if attempt.record.get("state") == "done"]
    if not isinstance(config, dict) or (last not in done and len(attempts) < len(numbers)):
        return None  # an attempt that the index lacks may be the complete one
    return Run(path, config, attempts, (done or [last])[-1].record)


def _attempt(path: Path, number: int, line: Values) -> Attempt:
    files = {name: line.get(name) for name in ("exit", "record")}
    held = {name: value if isinstance(value, dict) else {} for name, value in files.items()}
    return Attempt(path, number, held={"env": {}, **held})
