"""Reads the progress of an attempt from the two ends of its ``metrics.jsonl``.

The file of a long run holds millions of lines. The latest steps stand at its end; the memory of the
ranks is written after the warm-up, near its beginning.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.store.reading import open_regular

HEAD_BYTES = 2**14
TAIL_BYTES = 2**14
RANK_BYTES = 1024
"""More of both ends for every rank."""
RECENT_STEPS = 5
"""The speed now is the median of the last so many steps."""


@dataclass(frozen=True)
class ProgressEnds:
    """Numbers from both ends of the file."""

    steps: int = 0
    """Steps that every rank has finished."""
    step_s: float | None = None
    """Seconds of a step lately, of the slowest rank."""
    peak_bytes: int | None = None
    """Most memory of any rank, as far as they have measured it."""
    damaged: bool = False
    """Whether some step lacks what every step says."""


def read_ends(path: Path, num_ranks: int) -> ProgressEnds:
    """Returns the numbers, without reading the middle of the file.

    Args:
        path: ``metrics.jsonl``; it need not exist.
        num_ranks: an estimate of the number of ranks; a wrong one costs precision only.
    """
    more = RANK_BYTES * num_ranks
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES + more)
            tail = b""
            if size > len(head):
                file.seek(max(len(head), size - TAIL_BYTES - more))
                tail = file.read()
    except OSError:
        return ProgressEnds()
    lines = [*_lines(head), *_lines(tail)]
    peaks = [line["peak_bytes"] for line in lines if isinstance(line.get("peak_bytes"), int)]
    steps = [line for line in lines if line.get("kind") == "step"]
    whole = [line for line in steps if _is_whole(line)]
    done, times = _steps(whole, num_ranks)
    step_s = statistics.median(times) if times else None
    return ProgressEnds(done, step_s, max(peaks, default=None), len(whole) < len(steps))


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a piece of the file."""
    for text in data.split(b"\n"):
        if text[:1] == b"{" and text[-1:] == b"}":
            try:
                yield json.loads(text)
            except (ValueError, RecursionError):
                continue  # two pieces that look like one


def _is_whole(line: dict[str, Any]) -> bool:
    """Whether a step says which it is, of which rank, and how long it took."""
    named = type(line.get("step")) is int and type(line.get("rank")) is int
    return named and type(line.get("step_s")) in (int, float)


def _steps(lines: list[dict[str, Any]], num_ranks: int) -> tuple[int, list[float]]:
    """Returns how many steps all ranks have finished, and how long the last of them took."""
    by_step: dict[int, dict[int, float]] = {}
    for line in lines:
        by_step.setdefault(line["step"], {})[line["rank"]] = line["step_s"]
    world = max(num_ranks, *(len(ranks) for ranks in by_step.values())) if by_step else num_ranks
    whole = sorted(step for step, ranks in by_step.items() if len(ranks) >= world)
    times = [max(by_step[step].values()) for step in whole[-RECENT_STEPS:]]
    return (whole[-1] + 1 if whole else 0), times
