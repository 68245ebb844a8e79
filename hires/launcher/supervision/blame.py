"""Finds the rank that failed first, and why, when several have ended.

One rank that dies takes the others with it: within milliseconds they report that a neighbour is
gone. What a person needs to read is the first cause.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hires.launcher.end_reasons import END_REASONS
from hires.launcher.ranks.processes import RankProcess, last_lines
from hires.launcher.ranks.rank_group import AgentRank

_Event = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    cause: str
    """One paragraph."""
    tail: list[str]
    """The last lines of its log."""
    reason: str | None = None
    """A word of :data:`END_REASONS`, or None where nothing proves one."""


_SIGKILL = " (by `kill -9`, or the system ran out of memory)"


def first_failure(
    ranks: Sequence[AgentRank | RankProcess],
    failed: Iterable[int],
    events: Iterable[_Event],
    oom: str | None = None,
) -> Failure:
    """Returns the rank that failed first.

    Args:
        ranks: all ranks.
        failed: those that ended with an error before the supervisor stopped the rest.
        events: lines of ``events.jsonl``; a rank that could still write noted ``rank_failed``.
        oom: evidence that the kernel killed a process for lack of memory meanwhile, in words.
    """
    reports: dict[int, _Event] = {}
    for line in events:
        if line.get("event") == "rank_failed":
            reports.setdefault(line["rank"], line)
    suspects = [ranks[rank] for rank in sorted({*failed, *reports})]
    first = min(suspects, key=lambda rank: _order(rank, reports.get(rank.rank)))
    tail = last_lines(first.log)
    report = reports.get(first.rank)
    reason = _reason(first, report, tail, oom)
    return Failure(first.rank, _cause(first, report, tail, oom), tail, reason)


def _reason(
    rank: AgentRank | RankProcess,
    report: _Event | None,
    tail: Sequence[str],
    oom: str | None,
) -> str | None:
    """Returns the kind of failure, if something proves it."""
    if report is None and rank.code == -signal.SIGKILL:
        return "oom" if oom else None
    error = "" if report is None else str(report.get("type"))
    text = " ".join(tail[-3:]) if report is None else str(report.get("text"))
    return next((w for w, reason in END_REASONS.items() if reason.is_proved_by(error, text)), None)


def _order(rank: AgentRank | RankProcess, report: _Event | None) -> tuple[int, float, float]:
    """Returns what sorts causes before consequences, then earlier before later."""
    if report is not None:
        when = datetime.fromisoformat(report["time"]).timestamp()
        # The loss of a neighbour is a consequence, as long as any rank has another reason.
        return (2 if report.get("type") == "CommError" else 1, when, 0.0)
    # No rank is killed because its neighbour failed, and a killed one cannot report the time.
    killed = rank.code == -signal.SIGKILL
    try:  # of two that had ended at the same poll, the last to write failed last
        written_s = rank.log.stat().st_mtime
    except OSError:
        written_s = 0.0
    return (0 if killed else 1, rank.ended_s, written_s)


def _cause(
    rank: AgentRank | RankProcess,
    report: _Event | None,
    tail: Sequence[str],
    oom: str | None,
) -> str:
    if report is not None and report.get("text"):
        return f"rank {rank.rank} failed: {report['text']}"
    if rank.code is not None and rank.code < 0:
        name = _signal_name(-rank.code)
        hint = f" (memory was exhausted: {oom})" if oom else _SIGKILL
        hint = hint if name == "SIGKILL" else ""
        return f"rank {rank.rank} was killed by {name}{hint}"
    own = [line.strip() for line in tail if line.strip() and not line.startswith("srun: ")]
    last = own[-1] if own else ""
    return f"rank {rank.rank} exited with code {rank.code}" + (f": {last}" if last else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
