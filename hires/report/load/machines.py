"""Tells on which machines the ranks of runs stood, and what they shared there.

Every rank records where it runs; older records only hold the machine of rank 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hires.core.store.reading import text
from hires.report.frames import Frames
from hires.report.load.plain_values import count, dicts, dig
from hires.report.load.runs import Run

DEVICE = "device"
"""Source of a rank's memory in a record, if it computed on an accelerator."""


@dataclass(frozen=True)
class Machine:
    """One machine of a run."""

    host: str
    ranks: int
    """Ranks of the run on it."""
    cores: int | None
    """Cores that these ranks may use together; None: not recorded."""
    ranks_per_device: int
    """Most ranks that share one accelerator; 0 if none was recorded."""


def machines(run: Run) -> list[Machine]:
    """Returns the machines of a run, in the order of its ranks; empty if none was recorded."""
    host, cores = text(run.provenance.get("host"), 60), dig(run.provenance, "hardware", "cores")
    by_host: dict[str, list[dict[str, Any]]] = {}
    for rank in dicts(run.provenance.get("ranks")):
        by_host.setdefault(text(rank.get("host"), 60) or host or "?", []).append(rank)
    if by_host:
        return [_machine(name, ranks, count(cores)) for name, ranks in by_host.items()]
    if host is None:
        return []
    return [Machine(host, count(run.record.get("world")) or 1, count(cores), 0)]


def setting(frames: Frames) -> str:
    """Returns what kind of device was measured, as every figure says it."""
    places = [machine for run in frames.held for machine in machines(run)]
    cores = sorted({place.cores for place in places if place.cores})
    if not cores:
        return "device not recorded"
    several = len({place.host for place in places})
    sources = set(frames.memory["source"].dropna())
    kinds = ["accelerator"] if DEVICE in sources else []
    kinds += ["CPU"] if sources != {DEVICE} else []
    number = f"{cores[0]} to {cores[-1]}" if len(cores) > 1 else f"{cores[0]}"
    where = "1 machine" if several == 1 else f"{several} machines"
    parts = [f"{' and '.join(kinds)}, {number} cores{'' if several == 1 else ' each'}, {where}"]
    crowded = [place.ranks for place in places if place.cores and place.ranks > place.cores]
    if crowded and "CPU" in kinds:
        parts.append(f"simulated ranks: up to {max(crowded)} share the cores")
    elif several == 1 and max(place.ranks for place in places) > 1:
        parts.append("ranks are processes of one machine")
    most = max(place.ranks_per_device for place in places)
    if most > 1 and DEVICE in sources:
        parts.append(f"up to {most} ranks share one accelerator")
    return "; ".join(parts)


def _machine(host: str, ranks: list[dict[str, Any]], cores: int | None) -> Machine:
    """Returns a machine as its ranks recorded it; without their cores it has rank 0's."""
    lists = [rank.get("cores") for rank in ranks]
    used = {n for cores in lists if isinstance(cores, list) for n in map(count, cores)} - {None}
    visible = Counter(words for rank in ranks if (words := text(rank.get("devices"), 200)))
    shares = [-(-number // len(words.split(","))) for words, number in visible.items()]
    return Machine(host, len(ranks), len(used) or cores, max(shares, default=0))
