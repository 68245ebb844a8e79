"""Keeps ``results/index.jsonl``: one line for each attempt that has ended.

    append (end of an attempt)   lock | torn end? add a line break | one write | unlock
    replace (hires index)        mark the size; read all folders; lock | keep lines that were
                                 appended behind the mark | rename the new file | unlock

The index makes lists of thousands of runs quick and holds no truth: a line that is missing or torn
costs time and no result.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names
from hires.core.store.files import cannot_write, write_atomically

Values = dict[str, Any]

FILE = file_names.INDEX
SCHEMA = 1
PATIENCE_S = 5.0
"""How long a writer waits for the lock: a stopped process must not delay the end of a run."""
_POLL_S = 0.01
_MAX_LINE = 2**17
"""Characters of a line; a longer one is cut, and the attempt read in its folder."""
_MAX_TEXT = 2000
_FACTS = ("git", "hires", "torch", "python", "hardware", "host", "started", "ended")


def entry(run: Path, attempt: int, config: Values, record: Values, end: Values) -> Values:
    """Returns the line of an attempt that has ended.

    Args:
        run: the run folder.
        attempt: which of its attempts.
        config: the frozen config as plain values.
        record: the attempt's record; without numbers if it has none.
        end: the attempt's ``exit.json``.
    """
    brief_end = {key: end.get(key) for key in ("state", "reason", "cause", "started", "ended")}
    if isinstance(brief_end["cause"], str):
        brief_end["cause"] = brief_end["cause"][:_MAX_TEXT]
    line: Values = {
        "schema": SCHEMA,
        "campaign": run.parent.name,
        "run": run.name,
        "attempt": attempt,
    }
    line |= {"exit": brief_end, "config": config, "record": _brief(record)}
    if len(json.dumps(line)) > _MAX_LINE:
        line |= {"config": None, "record": {}}
    return line


def append(results: Path, line: Values) -> None:
    """Adds a line; any number of processes may do so at once.

    Raises:
        RunError: it cannot be written, or the lock is held for longer than ``PATIENCE_S``.
    """
    path = results / FILE
    data = json.dumps(line).encode() + b"\n"
    try:
        with _locked(results):
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # A writer that died in the middle of a line, or a full disk, left no line break.
                if _is_torn(fd):
                    data = b"\n" + data
                written = os.write(fd, data)
            finally:
                os.close(fd)
    except OSError as error:
        raise cannot_write(path, error) from error
    if written < len(data):
        raise RunError(f"{path} holds a part of a line only: is the disk full? `hires index` mends")


@dataclass(frozen=True)
class IndexMark:
    """How far an index was written at some moment."""

    inode: int
    num_bytes: int


def mark(results: Path) -> IndexMark:
    """Returns how far the index is written now; :func:`replace` keeps what is added later."""
    try:
        facts = (results / FILE).stat()
    except OSError:
        return IndexMark(0, 0)
    return IndexMark(facts.st_ino, facts.st_size)


def replace(results: Path, lines: Iterable[Values], since: IndexMark) -> None:
    """Writes the index anew; readers see the old one or the new one.

    Args:
        results: folder of all campaigns.
        lines: what run folders say.
        since: taken before the folders were read: lines that were added since then are kept.

    Raises:
        RunError: it cannot be written.
    """
    path = results / FILE
    whole = {_about(line): json.dumps(line) for line in lines}
    try:
        with _locked(results):
            for text in _added(path, since):
                with contextlib.suppress(ValueError, AttributeError, RecursionError):  # torn
                    whole.setdefault(_about(json.loads(text)), text)
            write_atomically(path, "".join(f"{text}\n" for text in whole.values()))
    except OSError as error:
        raise cannot_write(path, error) from error


def _about(line: Values) -> str:
    return json.dumps([line.get("campaign"), line.get("run"), line.get("attempt")])


def _added(path: Path, since: IndexMark) -> list[str]:
    """Returns the lines that were appended after a moment; all of them if the file is another."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino == since.inode:
                file.seek(since.num_bytes)
            return file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []


def _is_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


@contextlib.contextmanager
def _locked(results: Path) -> Iterator[None]:
    """Lets one process at a time write; the system frees the lock of a process that dies."""
    import filelock  # 30 ms, which only the end of an attempt pays

    results.stat()  # filelock would make a folder that is missing
    # A file of its own: the index itself is replaced, and then a lock on it protects nothing.
    lock = filelock.UnixFileLock(results / file_names.INDEX_LOCK)
    try:
        with lock.acquire(PATIENCE_S, poll_interval=_POLL_S):
            yield
    except filelock.Timeout:
        raise RunError(
            f"{results / FILE} is locked by another process for more than {PATIENCE_S:g} s; run "
            f"`hires index` when that is gone"
        ) from None


def _brief(record: Values) -> Values:
    """Returns a record without what no list of runs shows: samples, and ranks one by one."""
    lean = {
        key: value
        for key, value in record.items()
        if key not in ("samples", "throughput", "memory", "messages", "provenance", "resumed")
    }
    origin, sent = _dict(record.get("provenance")), _dict(record.get("messages"))
    speed = _dict(record.get("throughput"))
    lean["throughput"] = {key: speed.get(key) for key in ("img_per_s", "step_s", "samples")}
    lean["messages"] = {key: sent.get(key) for key in ("messages", "bytes")}
    lean["provenance"] = {key: origin.get(key) for key in _FACTS}
    lean["memory"] = [
        {key: _largest(record.get("memory"), key) for key in ("peak_bytes", "predicted_bytes")}
    ]
    return lean


def _largest(ranks: Any, key: str) -> int | None:
    """Returns the largest number of bytes of all ranks; None if there is none."""
    entries = ranks if isinstance(ranks, list) else []
    sizes = [_dict(rank).get(key) for rank in entries]
    return max((n for n in sizes if isinstance(n, int)), default=None)


def _dict(value: Any) -> Values:
    """Returns a dict as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}
