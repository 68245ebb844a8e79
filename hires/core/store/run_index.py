"""Writes how attempts ended: ``exit.json`` of each, and its line in ``results/index.jsonl``.

    append (end of an attempt)   lock | one write | unlock
    replace (hires index)        read all folders; lock | keep the lines of attempts that ended
                                 meanwhile | rename the new file | unlock

The index makes lists of thousands of runs quick and holds no truth: a line that is missing or torn
costs time and no result.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, provenance, reading, records
from hires.core.store.attempts import Attempt
from hires.core.store.files import append_line, cannot_write, write_atomically
from hires.core.store.naming import plain
from hires.core.store.reading import Note, Values

log = logging.getLogger(__name__)

FILE = file_names.INDEX
SCHEMA = 1
PATIENCE_S = 5.0
"""How long a writer waits for the lock: a stopped process must not delay the end of a run."""
Key = tuple[str, str, int]
"""Campaign, run and attempt of a line."""
_POLL_S = 0.01
_MAX_LINE = 2**17
"""Characters of a line; a longer one is cut, and the attempt read in its folder."""
_MAX_TEXT = 2000
_BRIEF = {
    "throughput": ("img_per_s", "step_s", "samples"),
    "messages": ("messages", "bytes"),
    "provenance": ("git", "hires", "torch", "python", "hardware", "host", "started", "ended"),
}
"""What a line holds of some parts of the record."""


def write_exit(run: Path, attempt: int, record: Values | None, end: Values) -> None:
    """Writes ``exit.json`` of an attempt, and its line in the index of all results.

    ``end`` has ``state`` and ``cause``, and may have ``reason`` (the cause in one word),
    ``exit_codes`` by rank, ``started`` and ``ended``. ``record`` is empty if the attempt has none;
    None: it measured nothing that belongs in a list of runs.

    Raises:
        RunError: ``exit.json`` cannot be written.
    """
    codes = sorted((int(rank), code) for rank, code in _as_dict(end.get("exit_codes")).items())
    end = {"reason": None, "started": None, "ended": provenance.now(), **end}
    end["exit_codes"] = {str(rank): code for rank, code in codes}
    folder = file_names.attempt_dir(run, attempt)
    write_atomically(folder / file_names.EXIT, json.dumps(end, indent=1) + "\n")
    if record is None:
        return
    try:
        config = records.read_config(run)
        if run.parent.name != config.campaign:
            return  # the folder was copied: what lies two folders above belongs to other runs
        # Rank 0 may have written a record before the launcher that should have was killed.
        record = record or records.read_record(folder) or {}
        append(run.parent.parent, entry(run, attempt, plain(config), record, end))
    except HiresError as error:  # lists read the folder instead
        log.warning("%s", error)


def write_cancelled(run: Path, attempt: int, cause: str) -> None:
    """Writes the end of a cancelled attempt without a supervisor: it waits, or its job is gone.

    The cause of an earlier end, as of a preemption, is kept behind the new one. If the attempt
    begins at this moment, its launcher writes its own end over this one. Errors are those of
    :func:`write_exit`.
    """
    before = Attempt(run, attempt).exit
    if before.get("cause"):
        cause = f"{cause}; before that: {before['cause']}"
    facts = {key: before[key] for key in ("exit_codes", "started", "ended") if before.get(key)}
    write_exit(run, attempt, {}, {"state": "cancelled", "cause": cause, **facts})


def entry(run: Path, attempt: int, config: Values, record: Values, end: Values) -> Values:
    """Returns the line of an attempt that has ended.

    It leaves out what no list of runs shows: samples, and ranks one by one. ``config``, ``record``
    and ``end`` are the values of ``config.yaml``, ``record.json`` and ``exit.json``.
    """
    brief_end = {key: end.get(key) for key in ("state", "reason", "cause", "started", "ended")}
    if isinstance(brief_end["cause"], str):
        brief_end["cause"] = brief_end["cause"][:_MAX_TEXT]
    brief = {key: value for key, value in record.items() if key not in ("samples", "resumed")}
    for key, kept in _BRIEF.items():
        values = _as_dict(record.get(key))
        brief[key] = {name: values.get(name) for name in kept}
    ranks = record.get("memory")
    brief["memory"] = [{}]
    for key in ("peak_bytes", "predicted_bytes"):
        sizes = [_as_dict(rank).get(key) for rank in ranks] if isinstance(ranks, list) else []
        brief["memory"][0][key] = max((n for n in sizes if isinstance(n, int)), default=None)
    line: Values = {"schema": SCHEMA, "campaign": run.parent.name, "run": run.name}
    line |= {"attempt": attempt, "exit": brief_end, "config": config, "record": brief}
    line["bytes"] = _sizes(run, attempt)
    if len(json.dumps(line)) > _MAX_LINE:
        line |= {"config": None, "record": {}}
    return line


def has_changed(run: Path, line: Values, of_run: bool) -> bool:
    """Whether a file that a line sums up is there, and of another size than then.

    It is damaged, or was written again. With ``of_run`` the run's record must be a copy of the
    attempt's.
    """
    then, now = _as_dict(line.get("bytes")), _sizes(run, _key(line)[2])
    pairs = [(now[name], then[name]) for name in now.keys() & then.keys()]
    if of_run and file_names.RECORD in then:
        pairs.append((reading.size_of(run / file_names.RECORD), then[file_names.RECORD]))
    return any(size not in (None, before) for size, before in pairs)


def _sizes(run: Path, attempt: int) -> dict[str, int | None]:
    """Returns the sizes of the files that a line sums up; None: missing."""
    folder = file_names.attempt_dir(run, attempt)
    sizes = {name: reading.size_of(folder / name) for name in (file_names.EXIT, file_names.RECORD)}
    return {**sizes, file_names.CONFIG: reading.size_of(run / file_names.CONFIG)}


def _as_dict(value: Any) -> Values:
    return value if isinstance(value, dict) else {}


def append(results: Path, line: Values) -> None:
    """Adds a line, many processes at once; RunError: it cannot, or the lock is held for long."""
    with _locked(results):
        append_line(results / FILE, line, locked=True)


def replace(results: Path, lines: Iterable[Values]) -> None:
    """Writes the index anew; readers see the old one or the new one.

    Of the present lines those stay whose attempt is none of the ``lines`` and has ended: it did so
    while the folders were read. Errors are those of :func:`append`.
    """
    whole = {_key(line): line for line in lines}
    notes: list[Note] = []
    with _locked(results):
        data = reading.read_bytes(results / FILE, notes)
        if notes:  # its lines would be lost
            why = f"{results / FILE} cannot be read ({notes[0].text})"
            raise RunError(f"{why}; move it away and run `hires index` again")
        for key, line in _by_key(reading.parse_lines(data or b"")).items():
            campaign, run, attempt = key
            if key not in whole and Attempt(results / campaign / run, attempt).exit:
                whole[key] = line
        text = "".join(json.dumps(line) + "\n" for line in whole.values())
        write_atomically(results / FILE, text)


def lines_of(results: Path, notes: list[Note]) -> dict[Key, Values]:
    """Returns the lines of the index of some results; of an attempt the last one counts."""
    return _by_key(reading.read_lines(results / FILE, notes))


def _by_key(lines: Iterable[Values]) -> dict[Key, Values]:
    return {_key(line): line for line in lines if line.get("schema") == SCHEMA}


def _key(line: Values) -> Key:
    attempt = line.get("attempt")
    return str(line.get("campaign")), str(line.get("run")), attempt if type(attempt) is int else -1


@contextlib.contextmanager
def _locked(results: Path) -> Iterator[None]:
    """Lets one process at a time write; the system frees the lock of a process that dies."""
    import filelock  # 30 ms, which only the end of an attempt pays

    # A file of its own: the index itself is replaced, and then a lock on it protects nothing.
    lock = filelock.UnixFileLock(results / file_names.INDEX_LOCK)
    try:
        results.stat()  # filelock would make a folder that is missing
        with lock.acquire(PATIENCE_S, poll_interval=_POLL_S):
            yield
    except filelock.Timeout:
        raise RunError(
            f"{results / FILE} is locked by another process for more than {PATIENCE_S:g} s; run "
            f"`hires index` when that is gone"
        ) from None
    except OSError as error:
        raise cannot_write(results / FILE, error) from error
