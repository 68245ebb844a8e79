"""Formats the log: one line per event, with time, rank, level when it matters, and text."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class RankFormatter(logging.Formatter):
    """Puts the time and the rank before every line, as ``12:03:04.518 rank 1 warning: text``."""

    def __init__(self, rank: int | None = None) -> None:
        """Takes the rank, or None in a process that is no rank (front end, supervisor)."""
        super().__init__()
        self.name = "hires" if rank is None else f"rank {rank}"

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, with a traceback below it if there is one."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        line = f"{time} {self.name}{level}: {record.getMessage()}"
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
