"""Lists the reasons for which an attempt ends before it is done; ``exit.json`` holds the word."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.errors import PREEMPTED, EditedError, RunError


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

JOB_ENDS: dict[str, tuple[str, str | None]] = {
    "CANCELLED": ("cancelled", None),
    "FAILED": ("failed", None),
    **{end: ("failed", name) for name, why in END_REASONS.items() for end in why.job_ends},
}
"""State and reason of a run whose job ended in such a state, if its attempt left no ``exit.json``.
Launchers other than Slurm translate their words."""


def restarts(reason: str | None) -> bool:
    """Whether an attempt ended so that its scheduler may start the same job again."""
    return reason in END_REASONS and END_REASONS[reason].restarts
