"""Finds the rank that failed first, and why: the others soon report that a neighbour is gone.

SIGKILL alone is no evidence of lack of memory: a person, a scheduler or a container can send it,
too; so the kernel's own count decides.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hires.core.errors import PREEMPTED
from hires.core.store.ends import END_REASONS, End, State
from hires.launcher.ranks.rank_group import Rank
from hires.launcher.status.run_progress import last_lines

STOPPED = (None, 0, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of ranks, if they have ended, that were stopped from outside."""

_Event = dict[str, Any]
_CGROUPS = Path("/sys/fs/cgroup")
_OOM_OF_STEP = re.compile(r"^slurmstepd\S*: error: Detected \d+ oom[_-]kill event", re.ASCII)


def first_failure(
    ranks: Sequence[Rank], failed: Iterable[int], events: Iterable[_Event], oom: str | None = None
) -> End:
    """Returns the end of a world as that of the rank that failed first.

    ``failed`` ended with an error before the supervisor stopped the rest. Those of them that could
    still write noted ``rank_failed`` in ``events``. ``oom`` tells of a kill for lack of memory.
    """
    reports: dict[int, _Event] = {}
    for line in events:
        if line.get("event") == "rank_failed":
            reports.setdefault(line["rank"], line)
    suspects = [ranks[rank] for rank in sorted({*failed, *reports})]
    first = min(suspects, key=lambda rank: _order(rank, reports.get(rank.rank)))
    tail = last_lines(first.log)
    cause, reason = _explained(first, reports.get(first.rank), tail, oom)
    cause = f"rank {first.rank} {cause}"
    return End(State.FAILED, cause, reason, tail=tuple(tail), failed_rank=first.rank)


def _order(rank: Rank, report: _Event | None) -> tuple[int, float, float]:
    """Returns what sorts causes before consequences, then earlier before later.

    0 killed by SIGKILL    no neighbour's failure does that, and it leaves no time to report
    1 any other error      by the time of the report, or else of the end
    2 CommError            the loss of a neighbour is a consequence, if any rank has another reason
    """
    if report is not None:
        when = datetime.fromisoformat(report["time"]).timestamp()
        return (2 if report.get("type") == "CommError" else 1, when, 0.0)
    try:  # of two that had ended at the same poll, the last to write failed last
        written_s = rank.log.stat().st_mtime
    except OSError:
        written_s = 0.0
    return (0 if rank.code == -signal.SIGKILL else 1, rank.ended_s, written_s)


def _explained(
    rank: Rank, report: _Event | None, tail: Sequence[str], oom: str | None
) -> tuple[str, str | None]:
    """Returns how a rank ended, in words, and the reason if something proves one."""
    if report is None and rank.code == -signal.SIGKILL:
        if oom:
            return f"was killed by SIGKILL (memory was exhausted: {oom})", "oom"
        return "was killed by SIGKILL (by `kill -9`, or the system ran out of memory)", None
    error = "" if report is None else str(report.get("type"))
    text = " ".join(tail[-3:]) if report is None else str(report.get("text"))
    reason = proved_reason(error, text)
    if report is not None and report.get("text"):
        return f"failed: {text}", reason
    if rank.code is not None and rank.code < 0:
        known = -rank.code in set(signal.Signals)
        name = signal.Signals(-rank.code).name if known else f"signal {-rank.code}"
        return f"was killed by {name}", reason
    own = [line.strip() for line in tail if line.strip()]
    return f"exited with code {rank.code}" + (f": {own[-1]}" if own else ""), reason


def has_cause(ranks: Iterable[Rank], events: Iterable[_Event]) -> bool:
    """Whether a rank failed by itself: it was not stopped, and did not only lose another."""
    reports = [line for line in events if line.get("event") == "rank_failed"]
    types = {line["rank"]: line.get("type") for line in reports}
    failed = {rank.rank for rank in ranks if rank.code not in STOPPED and rank.code != PREEMPTED}
    return any(types.get(rank) != "CommError" for rank in failed | types.keys())


def proved_reason(error: str, text: str) -> str | None:
    """Returns the first reason that an error proves: its type, or "" and what was printed."""
    return next((word for word, one in END_REASONS.items() if one.is_proved_by(error, text)), None)


class OomCount:
    """Counts the processes that the kernel has killed for lack of memory since it was made.

    The kernel counts for each step of a Slurm job by itself: Slurm writes the kills of the ranks'
    step, on any node, into ``log``, that of the command that started them.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._counter: Path | None = None
        self._before = 0
        for file in (*_counters(), Path("/proc/vmstat")):
            if (kills := _kills(file)) is not None:
                self._counter, self._before = file, kills
                break

    def rose(self) -> str | None:
        """Returns where a kill was counted since, in words; None if none was."""
        now = None if self._counter is None else _kills(self._counter)
        if now is None or now <= self._before:
            told = (line for line in last_lines(self._log, 40) if _OOM_OF_STEP.search(line))
            return next(told, None)
        return f"oom_kill in {self._counter} rose from {self._before} to {now}"


def _counters() -> list[Path]:
    """Returns the files of this process's control groups, of both versions, that may count."""
    files: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, name = _CGROUPS, "memory.events"
            elif "memory" in controllers.split(","):
                root, name = _CGROUPS / "memory", "memory.oom_control"
            else:
                continue
            files += [root / path.lstrip("/") / name, root / name]
    return files


def _kills(file: Path) -> int | None:
    """Returns the number behind ``oom_kill`` in a file; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        if match := re.search(r"^oom_kill (\d+)$", file.read_text(encoding="utf-8"), re.M):
            return int(match[1])
    return None
