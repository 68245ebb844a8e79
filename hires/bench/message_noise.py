"""Measures the noise of rows, and finds whether other programs ran beside their measurement.

The spread of the rounds alone does not show it: a steady load slows all rounds alike, and on two
cores a quiet machine has noisy cells of its own. So the threads that want a core are counted all
the time, and the cells of the noisiest tenth have a limit of their own.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hires.bench.message_race import relative_noise

TENTH = 0.9
MOST_OF_A_TENTH = 0.5
"""Noise that nine tenths of all medians stay below on a quiet machine: 0.23 on one of two cores."""
PERIOD_S = 0.1
LEAST_PROGRAMS = 1.0
"""Other programs, on average, from which they count."""
FEWEST_ROUNDS = 5
"""With fewer a median of distances passes over a disturbed round."""

_LOAD = Path("/proc/loadavg")


def noise_of(rows: Sequence[Mapping[str, Any]], share: float = 0.5) -> float:
    """Returns the noise that a share of all ways in all cells does not exceed, as a share of 1."""
    ways = (one for row in rows for one in row["ways"].values() if "rounds_s" in one)
    return float(np.quantile([relative_noise(one["rounds_s"]) for one in ways] or [0.0], share))


class ProgramCounter:
    """Counts the threads that want a core, ten times a second while its block runs."""

    def __init__(self) -> None:
        self._counts: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="programs", daemon=True)

    def __enter__(self) -> ProgramCounter:
        """Begins to count."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the counting."""
        self._ended.set()
        self._thread.join()

    def others(self, ranks_here: int) -> float:
        """Returns the mean since the last call, without this program and ``ranks_here`` ranks."""
        counts, self._counts = self._counts, []
        return max(0.0, statistics.fmean(counts or [running_threads()]) - 1 - ranks_here)

    def _count(self) -> None:
        # Not only when a row comes: the starter that passes it on runs just then.
        while not self._ended.wait(PERIOD_S):
            self._counts.append(running_threads())


def running_threads() -> float:
    """Returns how many threads of this machine run or want to, this one among them."""
    try:
        running = float(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        running = 0.0
    # This thread runs: a system that says 0 does not count them.
    return running if running >= 1 else os.getloadavg()[0] + 1


def disturbance(rows: Sequence[Mapping[str, Any]], cores: int | None = None) -> str:
    """Returns why the medians of rows cannot be trusted, in words; empty: no reason was found."""
    cores = cores or os.cpu_count() or 1
    ranks = max((row["ranks_per_node"] for row in rows), default=0)
    counts = [row["other_programs"] for row in rows if "other_programs" in row]
    others = statistics.fmean(counts or [0.0])
    reasons = []
    if others >= LEAST_PROGRAMS and others + ranks > cores:
        reasons.append(
            f"{others:.0f} other programs at a time shared {cores} cores with {ranks} ranks"
        )
    if (worst := noise_of(rows, TENTH)) > MOST_OF_A_TENTH:
        reasons.append(f"a tenth of all medians of rounds differ by {100 * worst:.0f} % or more")
    return " and ".join(reasons)


def noise_facts(rows: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    """Returns the lines on the noise of rows that stand above their tables."""
    typical, worst = (100 * noise_of(rows, share) for share in (0.5, TENTH))
    few = f"; {rounds} rounds hide a disturbed one, use --rounds {FEWEST_ROUNDS}"
    lines = [
        f"noise: the medians of rounds differ by {typical:.1f} %, in a tenth of the cells by "
        f"{worst:.1f} % or more{few if rounds < FEWEST_ROUNDS else ''}"
    ]
    if why := disturbance(rows):
        lines.append(f"DISTURBED: {why}; end other programs and measure again")
    return lines
