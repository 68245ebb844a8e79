"""Which rank failed first, and why, when several are down?

One rank that dies takes the others with it: within milliseconds they report that a neighbour is
gone. What a person needs to read is the one that began it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hires.launcher.ranks.processes import RankProcess, last_lines
from hires.launcher.ranks.rank_group import AgentRank


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    cause: str
    """One paragraph."""
    tail: list[str]
    """The last lines of its log."""
    reason: str | None = None
    """``oom``, ``nan``, ``hang``, ``parity``, or None where nothing proves one of them."""


_NO_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc", "MemoryError")
_SIGKILL = " (by `kill -9`, or the system ran out of memory)"
_KINDS = {"LossError": "nan", "ParityError": "parity"}
_TOO_LATE = ("timed out", "took over", "timeout")


def first_failure(
    ranks: Sequence[AgentRank | RankProcess],
    failed: Iterable[int],
    events: Iterable[dict[str, Any]],
    oom: str | None = None,
) -> Failure:
    """Returns the rank to blame.

    Args:
        ranks: all ranks.
        failed: those that ended with an error before the supervisor stopped the rest.
        events: lines of ``events.jsonl``; a rank that could still speak said ``rank_failed`` there.
        oom: evidence that the kernel killed a process for lack of memory meanwhile, in words.
    """
    told: dict[int, dict[str, Any]] = {}
    for line in events:
        if line.get("event") == "rank_failed":
            told.setdefault(line["rank"], line)
    suspects = [ranks[rank] for rank in sorted({*failed, *told})]
    first = min(suspects, key=lambda rank: _order(rank, told.get(rank.rank)))
    tail = last_lines(first.log)
    said = told.get(first.rank)
    reason = _reason(first, said, tail, oom)
    return Failure(first.rank, _cause(first, said, tail, oom), tail, reason)


def _reason(
    rank: AgentRank | RankProcess, told: dict[str, Any] | None, tail: Sequence[str], oom: str | None
) -> str | None:
    """Returns the kind of failure, if something proves it."""
    if told is None and rank.code == -signal.SIGKILL:
        return "oom" if oom else None
    kind = "" if told is None else str(told.get("type"))
    text = " ".join(tail[-3:]) if told is None else f"{kind}: {told.get('text')}"
    if kind in _KINDS:
        return _KINDS[kind]
    if any(words in text for words in _NO_MEMORY):
        return "oom"
    if kind == "CommError" and any(words in text.lower() for words in _TOO_LATE):
        return "hang"
    return None


def _order(rank: AgentRank | RankProcess, told: dict[str, Any] | None) -> tuple[int, float, float]:
    """Returns what sorts causes before consequences, then earlier before later."""
    if told is not None:
        when = datetime.fromisoformat(told["time"]).timestamp()
        # To lose a neighbour is a consequence, as long as any rank has another reason.
        return (2 if told.get("type") == "CommError" else 1, when, 0.0)
    # Nobody kills a rank because its neighbour failed, and it cannot tell when it happened.
    murdered = rank.code == -signal.SIGKILL
    try:  # of two that were found dead at once, the one that spoke last failed last
        spoke = rank.log.stat().st_mtime
    except OSError:
        spoke = 0.0
    return (0 if murdered else 1, rank.ended_s, spoke)


def _cause(
    rank: AgentRank | RankProcess, told: dict[str, Any] | None, tail: Sequence[str], oom: str | None
) -> str:
    """Returns why a rank failed, in words."""
    if told is not None and told.get("text"):
        return f"rank {rank.rank} failed: {told['text']}"
    if rank.code is not None and rank.code < 0:
        name = _signal_name(-rank.code)
        hint = f" (memory was exhausted: {oom})" if oom else _SIGKILL
        hint = hint if name == "SIGKILL" else ""
        return f"rank {rank.rank} was killed by {name}{hint}"
    own = [line.strip() for line in tail if line.strip() and not line.startswith("srun: ")]
    last = own[-1] if own else ""
    return f"rank {rank.rank} exited with code {rank.code}" + (f": {last}" if last else "")


def _signal_name(number: int) -> str:
    """Returns a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
