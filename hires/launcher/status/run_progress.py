"""Reads the progress of a run from the lines that its ranks append.

A step is over when every rank has reported it, and took as long as its slowest rank. The files of a
long run hold millions of lines, so :func:`read_ends` reads only their two ends: the latest steps
stand at the end, the memory of a rank, written after the warm-up, near the beginning.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core import units
from hires.core.errors import RunError
from hires.core.store.file_names import METRICS, line_files
from hires.core.store.reading import open_regular, parse_lines

END_BYTES = 2**13
"""So much of both ends of a file is read."""
RECENT_STEPS = 5
"""The speed now is the median of the last so many steps."""

_Line = dict[str, Any]


class FileTail:
    """Reads a growing file, each time what was added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    @property
    def seen(self) -> bool:
        """Whether there was any line yet."""
        return self._offset > 0

    def lines(self, to_end: bool = False) -> Iterator[bytes]:
        """Yields the lines that were completed since the last call.

        With ``to_end`` a last line without its end counts too; else it is still being written.
        Too many open files are then a RunError; else the next call reads what this one could not.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                while data := file.readline():
                    if not (data.endswith(b"\n") or to_end):
                        break
                    self._offset += len(data)
                    yield data
        except OSError as error:
            if to_end and error.errno in (errno.EMFILE, errno.ENFILE):
                raise RunError(f"cannot read {self.path}: {error.strerror}") from error


class LinesTail:
    """Follows the growing files of one kind of JSON lines of an attempt, as its ``METRICS``."""

    def __init__(self, attempt: Path, name: str) -> None:
        self._attempt, self._name = attempt, name
        self._tails: dict[Path, FileTail] = {}

    @property
    def seen(self) -> bool:
        """Whether there was any line yet."""
        return any(tail.seen for tail in self._tails.values())

    def read(self) -> list[_Line]:
        """Returns what the lines hold that were completed since the last call."""
        lines: list[_Line] = []
        for path in line_files(self._attempt, self._name):
            tail = self._tails.setdefault(path, FileTail(path))
            lines += parse_lines(b"".join(tail.lines()))
        return lines


def last_lines(log: Path, count: int = 20) -> list[str]:
    """Returns the last lines of a log, without reading all of it."""
    try:
        with open_regular(log) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200 * count))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:]


@dataclass(frozen=True)
class FinishedStep:
    """A step that every rank has finished."""

    index: int
    """From 0."""
    step_s: float
    """Time of the slowest rank, in seconds."""
    img_per_s: float
    """Images of the whole world per second."""
    loss: float | None
    """Mean over the ranks that report one; None if none does."""
    skipped: bool = False
    """Whether gradients overflowed in fp16, so that no parameter moved."""

    @property
    def loss_text(self) -> str:
        """The loss as lines about a step end; empty if there is none."""
        if self.loss is None:
            return ""
        return f"  loss {self.loss:.4g}{', skipped: gradients overflow' if self.skipped else ''}"


class RunProgress:
    """Puts the lines of all ranks together to steps."""

    def __init__(self, world: int, batch: int, steps: int) -> None:
        self.world, self.batch, self.steps = world, batch, steps
        self._open: dict[int, dict[int, _Line]] = {}

    def feed(self, line: _Line) -> FinishedStep | None:
        """Returns the step that this line of a rank completes, or None."""
        if line.get("kind") != "step":
            return None
        ranks = self._open.setdefault(line["step"], {})
        ranks[line["rank"]] = line
        if len(ranks) < self.world:
            return None
        del self._open[line["step"]]
        step_s = max(one["step_s"] for one in ranks.values())
        losses = [one["loss"] for one in ranks.values() if one.get("loss") is not None]
        loss = math.fsum(losses) / len(losses) if losses else None
        speed = self.batch / step_s if step_s > 0 else 0.0
        return FinishedStep(line["step"], step_s, speed, loss, line.get("skipped") is True)

    def text(self, step: FinishedStep) -> str:
        """Returns a plain line about a step, as ``step 3/12  418.0 ms  19.1 img/s  loss 2.301``."""
        facts = f"{units.seconds(step.step_s)}  {step.img_per_s:.4g} img/s{step.loss_text}"
        return f"step {step.index + 1}/{self.steps}  {facts}"

    def printer(self, say: Callable[[str], None]) -> Callable[[_Line], None]:
        """Returns what takes every line of the ranks and says when a step is over."""

        def on_line(line: _Line) -> None:
            if (step := self.feed(line)) is not None:
                say(self.text(step))

        return on_line


@dataclass(frozen=True)
class ProgressEnds:
    """Numbers from both ends of the files."""

    steps: int = 0
    """Steps that every rank has finished."""
    step_s: float | None = None
    """Seconds of a step lately, of the slowest rank."""
    peak_bytes: int | None = None
    """Most memory of any rank, as far as they have measured it."""
    damaged: bool = False
    """Whether some step lacks what every step says."""


def read_ends(attempt: Path, num_ranks: int) -> ProgressEnds:
    """Returns the numbers of an attempt, without reading the middle of files.

    ``num_ranks`` is an estimate of the number of ranks; a wrong one costs precision only.
    """
    lines: list[_Line] = []
    for path in line_files(attempt, METRICS):
        with contextlib.suppress(OSError), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(END_BYTES)
            if size > len(data):
                file.seek(max(len(data), size - END_BYTES))
                data += b"\n" + file.read()
            lines += parse_lines(data)
    peaks = [line["peak_bytes"] for line in lines if isinstance(line.get("peak_bytes"), int)]
    steps = [line for line in lines if line.get("kind") == "step"]
    whole = [
        {key: line[key] for key in ("kind", "step", "rank", "step_s")}
        for line in steps
        if type(line.get("step")) is int
        and type(line.get("rank")) is int
        and type(line.get("step_s")) in (int, float)
    ]
    progress = RunProgress(max([num_ranks, *(line["rank"] + 1 for line in whole)]), 1, 0)
    over = sorted(filter(None, map(progress.feed, whole)), key=lambda step: step.index)
    times = [step.step_s for step in over[-RECENT_STEPS:]]
    return ProgressEnds(
        over[-1].index + 1 if over else 0,
        statistics.median(times) if times else None,
        max(peaks, default=None),
        len(whole) < len(steps),
    )
