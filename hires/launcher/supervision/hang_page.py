"""Writes the page that explains why a world of ranks does not move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import RankStatus
from hires.plan.proof.stalled import Stall

AFTER_HEAD = "\n\nlast communications"
"""What comes before it is shown on the screen."""
SHOWN_RANKS = 16
"""Ranks that get more than one line each."""
SHOWN_WAITS = 6
SHOWN_OPS = 4
SHOWN_FRAMES = 6


@dataclass
class HangFindings:
    """Where the ranks stand, and who waits for whom."""

    attempt: Path
    answers: Mapping[int, RankStatus]
    """Status of each rank that answered."""
    silent: Mapping[int, str]
    """Why each rank on this machine cannot answer; empty: it can."""
    world: int
    ages_s: Mapping[int, float] = field(default_factory=dict)
    """How old each rank's heartbeat is."""
    stall: Stall | None = None
    """Who waits for whom, if there is a plan."""

    @property
    def culprits(self) -> list[int]:
        """The ranks that keep the others from going on."""
        if self.stall is not None and self.stall.culprits:
            return self.stall.culprits
        if self.stall is not None and self.stall.circle:
            return self.stall.circle
        mute = [rank for rank in range(self.world) if rank not in self.answers]
        return mute or [rank for rank, where in self.answers.items() if not where.what]


def cause(found: HangFindings) -> str:
    """Returns why nothing moves, in one paragraph."""
    parts = [_state_of(found, rank) for rank in found.culprits[:SHOWN_WAITS]]
    if found.stall is not None and found.stall.circle:
        parts = ["ranks wait for each other in a circle"]
    waits = found.stall.waits if found.stall is not None else []
    blamed = set(found.culprits)
    first = next((w for w in waits if blamed & set(w.others)), waits[0] if waits else None)
    if first is not None:
        parts.append(first.text)
    return "no progress: " + ("; ".join(parts) or "no rank answers")


def page(found: HangFindings) -> str:
    """Returns the whole page."""
    lines = [cause(found), ""]
    if found.stall is not None:
        lines += [f"unmatched: {text}" for text in found.stall.unmatched[:SHOWN_WAITS]]
        others = len(found.stall.waits) - SHOWN_WAITS
        lines += [wait.text for wait in found.stall.waits[:SHOWN_WAITS]]
        lines += [f"and {others} more ranks wait"] if others > 0 else []
    lines += ["", "where every rank stands"]
    detailed = list(_shown(found))
    lines += [f"  {_state_of(found, rank)}" for rank in detailed]
    lines += [f"  {text}" for text in _alike(found, detailed)]
    lines += ["", "last communications of each rank"]
    for rank in detailed:
        if rank in found.answers and found.answers[rank].last:
            ops = ", ".join(found.answers[rank].last[-SHOWN_OPS:])
            lines.append(f"  rank {rank}: {ops}")
    lines += ["", f"Python stacks, innermost first (whole: {found.attempt / 'logs'}/stacks-*.txt)"]
    for rank in detailed:
        lines += [f"  rank {rank}", *(f"    {frame}" for frame in _frames(found.attempt, rank))]
    return "\n".join(lines) + "\n"


def _shown(found: HangFindings) -> Iterator[int]:
    """Yields the ranks that get several lines, those to blame first."""
    blamed = list(dict.fromkeys([*found.culprits, *range(found.world)]))
    yield from sorted(blamed[:SHOWN_RANKS])


def _alike(found: HangFindings, detailed: Collection[int]) -> Iterator[str]:
    """Yields how many of the other ranks are at the same place."""
    places: dict[str, list[int]] = {}
    for rank in range(found.world):
        if rank not in detailed:
            places.setdefault(_place(found, rank), []).append(rank)
    for place, ranks in places.items():
        yield f"{len(ranks)} more, as rank {ranks[0]}: {place}"


def _place(found: HangFindings, rank: int) -> str:
    """Returns where a rank is, without its number and its times."""
    status = found.answers.get(rank)
    if status is None:
        return f"does not answer: {found.silent.get(rank) or 'no reason is known'}"
    where = f"{status.action} of " if status.action else ""
    return f"in {where}step {status.step}, waits in {status.what or 'nothing'}"


def _state_of(found: HangFindings, rank: int) -> str:
    """Returns where a rank stands, in one line."""
    age = found.ages_s.get(rank)
    beat = "" if age is None else f" (last heartbeat {age:.0f} s ago)"
    status = found.answers.get(rank)
    if status is None:
        why = found.silent.get(rank) or ("no sign of life" if age is None else "no reason is known")
        return f"rank {rank} does not answer: {why}{beat}"
    where = f"step {status.step}" if status.step >= 0 else "before the first step"
    if status.action:
        where = f"{status.action} of {where}"
    if status.what:
        return f"rank {rank} is in {where} and waits in {status.what}, {status.since_s:.1f} s"
    still = f"nothing moved for {status.since_s:.1f} s"
    return f"rank {rank} is in {where} and waits for no rank; {still}"


def _frames(attempt: Path, rank: int) -> list[str]:
    """Returns the innermost frames of a rank's main thread."""
    try:
        text = heartbeat.stacks_file(attempt, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ["no stack: it did not answer"]
    main = text.rstrip().split("\n\n")[-1]  # the main thread comes last
    frames = [line.strip() for line in main.splitlines() if line.startswith("  File ")]
    return frames[:SHOWN_FRAMES] or ["no stack: it did not answer"]
