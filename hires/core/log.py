"""Formats the log: one line per event, with time, rank, level when it matters, and text."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class RankFormatter(logging.Formatter):
    """Puts time and rank before every line, as ``2026-01-31T12:03:04.518Z rank 1 warning: text``.

    The time is UTC, so that the logs of machines in several zones sort as text.
    """

    def __init__(self, rank: int | None = None) -> None:
        """Takes the rank, or None in a process that is no rank (front end, supervisor)."""
        super().__init__()
        self.name = "hires" if rank is None else f"rank {rank}"

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, with a traceback below it if there is one."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        now = now.replace("+00:00", "Z")
        line = f"{now} {self.name}{level}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup(rank: int | None = None, stream: TextIO | None = None) -> None:
    """Logs this process to ``stream`` (unset: stderr); ranks above 0 only warn."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RankFormatter(rank))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if rank in (None, 0) else logging.WARNING)
