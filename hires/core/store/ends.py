"""How attempts end: the states of runs, the reasons of failures, and ``exit.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from hires.core.errors import INTERRUPTED, PREEMPTED, EditedError, RunError
from hires.core.store import file_names, provenance
from hires.core.store.files import write_atomically
from hires.core.store.reading import Values


class State(StrEnum):
    """The state of a run, and of an attempt that has ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    INFEASIBLE = "infeasible"
    PENDING = "pending"
    RUNNING = "running"


ENDS = (State.DONE, State.FAILED, State.CANCELLED, State.LOST)
"""States of an attempt that has ended."""


@dataclass(frozen=True)
class EndReason:
    """One reason, and what proves it."""

    evidence: str
    """In one phrase, as ``docs/running.md`` has it."""
    errors: tuple[str, ...] = ()
    """Types of a rank's error that prove it; empty: any, if the text does."""
    texts: tuple[str, ...] = ()
    """Parts of the error's text, in lower case, of which one must occur; empty: any text."""
    job_ends: tuple[str, ...] = ()
    """States of a scheduler's ended job that mean this, in Slurm's words."""
    restarts: bool = False
    """Whether the scheduler may start the same job again."""
    exit_code: int = RunError.exit_code
    """Of the command that launched the run."""

    def is_proved_by(self, error: str, text: str) -> bool:
        """Whether a rank's error proves it: its type and text, or "" and the end of its log."""
        text = f"{error}: {text}".lower()
        return (
            bool(self.errors or self.texts)
            and (not self.errors or error in self.errors)
            and (not self.texts or any(part in text for part in self.texts))
        )


END_REASONS = {
    "edited": EndReason(
        "something that the run was planned from was edited before it began",
        errors=("EditedError",),
        exit_code=EditedError.exit_code,
    ),
    "nan": EndReason("the loss was no longer finite", errors=("LossError",)),
    "parity": EndReason("`hires verify` found a difference", errors=("ParityError",)),
    "oom": EndReason(
        "the kernel counted a kill, or an allocation failed",
        texts=(
            "can't allocate memory",
            "out of memory",
            "oom_kill",
            "std::bad_alloc",
            "memoryerror",
        ),
        job_ends=("OUT_OF_MEMORY",),
    ),
    "hang": EndReason(
        "no rank made progress for `comm.timeout_s`",
        errors=("CommError",),
        texts=("timed out", "took over", "timeout"),
    ),
    "launch": EndReason("no rank reached its first record"),
    "preempted": EndReason(
        "Slurm ended the job for another job",
        job_ends=("PREEMPTED",),
        restarts=True,
        exit_code=PREEMPTED,
    ),
    "requeued": EndReason(
        "Slurm ended the job and queued it again, as `scontrol requeue` asks",
        restarts=True,
        exit_code=PREEMPTED,
    ),
    "timeout": EndReason(
        "Slurm ended the job at its time limit",
        job_ends=("TIMEOUT", "DEADLINE"),
        restarts=True,
        exit_code=PREEMPTED,
    ),
    "node": EndReason(
        "Slurm ended the job because a node failed",
        job_ends=("NODE_FAIL", "BOOT_FAIL"),
        restarts=True,
    ),
}
"""By the word; the first that an error proves is its reason."""

JOB_ENDS: dict[str, tuple[State, str | None]] = {
    "CANCELLED": (State.CANCELLED, None),
    "FAILED": (State.FAILED, None),
    **{end: (State.FAILED, name) for name, why in END_REASONS.items() for end in why.job_ends},
}
"""State and reason of a run whose job ended in such a state, if its attempt left no ``exit.json``.
Launchers other than Slurm translate their words."""


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    state: str
    """One of :data:`ENDS`; ``lost``: of a job that left no ``exit.json``."""
    cause: str | None = None
    """Why it is not done, in one paragraph."""
    reason: str | None = None
    """The cause in one word, of :data:`END_REASONS`."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """By rank; negative: the signal that ended it, which may be the launcher's."""
    started: str | None = None
    ended: str | None = None
    tail: tuple[str, ...] = ()
    """The last lines of the log of ``failed_rank``, which failed first; not in ``exit.json``."""
    failed_rank: int | None = None

    @property
    def exit_code(self) -> int:
        """What the command that launched should exit with."""
        if self.reason in END_REASONS:
            return END_REASONS[self.reason].exit_code
        codes = {State.DONE: 0, State.CANCELLED: INTERRUPTED}
        return codes.get(State(self.state), RunError.exit_code)

    @property
    def restarts(self) -> bool:
        """Whether the scheduler may start the same job again."""
        return self.reason in END_REASONS and END_REASONS[self.reason].restarts

    def cancelled(self, cause: str) -> End:
        """Returns the end of an attempt that was cancelled after it had ended so."""
        before = f"; before that: {self.cause}" if self.cause else ""
        return replace(self, state=State.CANCELLED, cause=cause + before, reason=None)

    def write(self, run: Path, attempt: int) -> None:
        """Writes ``exit.json`` of an attempt; a RunError: it cannot."""
        values = {
            "state": self.state,
            "cause": self.cause,
            "reason": self.reason,
            "started": self.started,
            "ended": self.ended or provenance.now(),
            "exit_codes": {str(rank): code for rank, code in sorted(self.exit_codes.items())},
        }
        folder = file_names.attempt_dir(run, attempt)
        write_atomically(folder / file_names.EXIT, json.dumps(values, indent=1) + "\n")


def end_of(values: Values) -> End:
    """Returns the end that ``exit.json`` holds; ValueError: a value is missing or no text."""
    texts: list[Any] = [values.get(key) for key in ("cause", "reason", "started", "ended")]
    state, codes = values.get("state"), values.get("exit_codes") or {}
    if state not in ENDS or not all(isinstance(text, str | None) for text in texts):
        raise ValueError(f"state {state!r:.40}")
    if not isinstance(codes, dict) or not all(type(code) is int for code in codes.values()):
        raise ValueError(f"exit codes {codes!r:.40}")
    cause, reason, started, ended = texts
    return End(state, cause, reason, {int(k): code for k, code in codes.items()}, started, ended)
