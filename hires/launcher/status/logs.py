"""Merges the logs of all ranks in the order of time, once or as they grow.

Every rank has a log of its own. A line that begins with a time begins an entry; lines without one,
as a traceback, belong to it, so that entries of several ranks never mix.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.store.reading import open_regular

_TIME = re.compile(r"(\d\d):(\d\d):(\d\d\.\d+) ")
_DAY_S = 86400.0


@dataclass(order=True)
class LogEntry:
    """Some lines of one rank that belong together."""

    time_s: float
    """Since midnight of the day on which the log begins; -1: before the first time in it."""
    rank: int
    lines: list[str] = field(compare=False)


def merged(files: dict[int, Path]) -> Iterator[LogEntry]:
    """Yields the entries of some logs in the order of time, of one time by rank."""
    yield from heapq.merge(*(RankLog(rank, path).read(to_end=True) for rank, path in files.items()))


class Follower:
    """Reads some logs as they grow."""

    def __init__(self) -> None:
        self._logs: dict[Path, RankLog] = {}

    def read(self, files: dict[int, Path]) -> list[LogEntry]:
        """Returns what has been added to the logs since the last call, in the order of time.

        Args:
            files: the logs by rank; there may be more of them than the last time.
        """
        for rank, path in files.items():
            self._logs.setdefault(path, RankLog(rank, path))
        return sorted(entry for path in files.values() for entry in self._logs[path].read())


class RankLog:
    """One rank's log, and how far it was read."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        self._offset = 0
        self._time_s = -1.0

    def read(self, to_end: bool = False) -> Iterator[LogEntry]:
        """Yields the entries that were added.

        Args:
            to_end: whether a last line without its end counts too; else it is still being written.
        """
        with contextlib.suppress(OSError), open_regular(self.path) as file:
            file.seek(self._offset)
            entry = LogEntry(self._time_s, self.rank, [])
            for data in file:
                if not data.endswith(b"\n") and not to_end:
                    break
                self._offset += len(data)
                text = data.decode(errors="replace").rstrip("\r\n")
                match = _TIME.match(text)
                if match is not None:
                    if entry.lines:
                        yield entry
                    hours, minutes, seconds = match.groups()
                    time_s = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
                    while time_s < self._time_s - _DAY_S / 2:  # it is of a later day
                        time_s += _DAY_S
                    self._time_s = time_s
                    entry = LogEntry(time_s, self.rank, [])
                entry.lines.append(text)
            if entry.lines:
                yield entry
