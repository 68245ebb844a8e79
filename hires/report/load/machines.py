"""On which machines did the ranks of a run stand, and what did they share there?

Every rank says where it stands; a record of before they did knows the machine of rank 0 alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hires.report.load.reading import count, dicts, dig, text
from hires.report.load.runs import Run


@dataclass(frozen=True)
class Place:
    """One machine of a run."""

    host: str
    ranks: int
    """Ranks of the run on it."""
    cores: int | None
    """Cores that these ranks may use together; None: not recorded."""
    on_device: int
    """Most ranks that share one accelerator; 0 if nobody said which they see."""


def places(run: Run) -> list[Place]:
    """Returns the machines of a run, in the order of its ranks; none if it recorded none."""
    host, cores = text(run.provenance.get("host"), 60), dig(run.provenance, "hardware", "cores")
    told: dict[str, list[dict[str, Any]]] = {}
    for rank in dicts(run.provenance.get("ranks")):
        told.setdefault(text(rank.get("host"), 60) or host or "?", []).append(rank)
    if told:
        return [_place(name, ranks, count(cores)) for name, ranks in told.items()]
    return (
        [] if host is None else [Place(host, count(run.record.get("world")) or 1, count(cores), 0)]
    )


def _place(host: str, ranks: list[dict[str, Any]], cores: int | None) -> Place:
    """Returns a machine by what its ranks say; without their cores it has those of rank 0's."""
    lists = [rank.get("cores") for rank in ranks]
    known = {n for cores in lists if isinstance(cores, list) for n in map(count, cores)} - {None}
    seen = Counter(words for rank in ranks if (words := text(rank.get("devices"), 200)))
    shares = [-(-number // len(words.split(","))) for words, number in seen.items()]
    return Place(host, len(ranks), len(known) or cores, max(shares, default=0))
