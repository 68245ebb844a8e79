"""Writes the page that explains why a world of ranks does not move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import RankStatus
from hires.core.store import file_names
from hires.plan.proof.stalled import Stall

SHOWN_RANKS = 16
"""Ranks that get more than one line each."""
SHOWN_WAITS = 6
SHOWN_OPS = 4
SHOWN_FRAMES = 6
_AFTER_HEAD = "\n\nlast communications"
"""What comes before it is shown on the screen."""
_NO_STACK = ["no stack: it did not answer"]


@dataclass
class Hang:
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
        if self.stall is not None and (self.stall.culprits or self.stall.circle):
            return self.stall.culprits or self.stall.circle
        mute = [rank for rank in range(self.world) if rank not in self.answers]
        return mute or [rank for rank, where in self.answers.items() if not where.what]

    @property
    def cause(self) -> str:
        """Why nothing moves, in one paragraph."""
        parts = [self._state_of(rank) for rank in self.culprits[:SHOWN_WAITS]]
        if self.stall is not None and self.stall.circle:
            parts = ["ranks wait for each other in a circle"]
        waits = self.stall.waits if self.stall is not None else []
        blamed = set(self.culprits)
        first = next((w for w in waits if blamed & set(w.others)), waits[0] if waits else None)
        if first is not None:
            parts.append(first.text)
        return "no progress: " + ("; ".join(parts) or "no rank answers")

    def page(self) -> str:
        """Returns the whole page."""
        lines = [self.cause, ""]
        if self.stall is not None:
            lines += [f"unmatched: {text}" for text in self.stall.unmatched[:SHOWN_WAITS]]
            others = len(self.stall.waits) - SHOWN_WAITS
            lines += [wait.text for wait in self.stall.waits[:SHOWN_WAITS]]
            lines += [f"and {others} more ranks wait"] if others > 0 else []
        # Culprits first; of the others as many as fit the page, and the rest in groups.
        order = list(dict.fromkeys([*self.culprits, *range(self.world)]))
        detailed = sorted(order[:SHOWN_RANKS])
        lines += ["", "where every rank stands"]
        lines += [f"  {self._state_of(rank)}" for rank in detailed]
        lines += [f"  {text}" for text in self._alike(order[SHOWN_RANKS:])]
        lines += ["", "last communications of each rank"]
        for rank in detailed:
            if rank in self.answers and self.answers[rank].last:
                lines.append(f"  rank {rank}: {', '.join(self.answers[rank].last[-SHOWN_OPS:])}")
        logs = self.attempt / file_names.LOGS
        lines += ["", f"Python stacks, innermost first (whole: {logs}/stacks-*.txt)"]
        for rank in detailed:
            lines += [f"  rank {rank}", *(f"    {frame}" for frame in self._frames(rank))]
        return "\n".join(lines) + "\n"

    def _alike(self, ranks: list[int]) -> Iterator[str]:
        """Yields how many of some ranks are at the same place."""
        places: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            places.setdefault(self._place_of(rank), []).append(rank)
        for place, same in places.items():
            yield f"{len(same)} more, as rank {same[0]}, which {place}"

    def _place_of(self, rank: int) -> str:
        """Returns where a rank stands, without times: alike for all ranks at one place."""
        status = self.answers.get(rank)
        if status is None:
            unknown = "no reason is known" if rank in self.ages_s else "no sign of life"
            return f"does not answer: {self.silent.get(rank) or unknown}"
        where = f"step {status.step}" if status.step >= 0 else "before the first step"
        where = f"{status.action} of {where}" if status.action else where
        return f"is in {where} and waits {f'in {status.what}' if status.what else 'for no rank'}"

    def _state_of(self, rank: int) -> str:
        """Returns where a rank stands and since when, in one line."""
        status, age_s = self.answers.get(rank), self.ages_s.get(rank)
        if status is not None:
            since = f"{status.since_s:.1f} s"
            since = f", {since}" if status.what else f"; nothing moved for {since}"
        else:
            since = "" if age_s is None else f" (last heartbeat {age_s:.0f} s ago)"
        return f"rank {rank} {self._place_of(rank)}{since}"

    def _frames(self, rank: int) -> list[str]:
        """Returns the innermost frames of a rank's main thread."""
        path = heartbeat.stacks_file(self.attempt, rank)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return _NO_STACK
        main = text.rstrip().split("\n\n")[-1]  # the main thread comes last
        frames = [line.strip() for line in main.splitlines() if line.startswith("  File ")]
        return frames[:SHOWN_FRAMES] or _NO_STACK


def head(attempt: Path) -> list[str]:
    """Returns the first part of an attempt's page, for the screen; nothing if there is none."""
    try:
        text = (attempt / file_names.HANG).read_text(encoding="utf-8")
    except OSError:
        return []
    return text.partition(_AFTER_HEAD)[0].rstrip().splitlines()
