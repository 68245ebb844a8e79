"""Finds out why Slurm ends a job early: its time limit, a preemption, or a node that went down.

Clusters differ. Some send SIGUSR2 some time before, as ``--signal`` asks; many end a job by plain
SIGTERM, as ``scancel`` does too, and kill it soon afterwards. The fields that Slurm shows of the
job and its nodes at that moment tell a preemption from a user's ``scancel``.
"""

from __future__ import annotations

import os

from hires.core.errors import RunError
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.allocation import Allocation

PATIENCE_S = 3.0
"""How long Slurm may take to answer after SIGTERM: soon it sends SIGKILL."""
_EARLY_S = 75
"""Slurm may send a signal by as much earlier than ``--signal`` says."""
_END_S = 5
"""Kept for the supervisor's own end."""
_GONE_NODE = ("DOWN", "FAIL", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN")


def after_sigusr2(job: str, signal_s: int) -> Preemption:
    """Returns why Slurm sent SIGUSR2 to the job of this name, ``launcher.signal_s`` before its end.

    That is its time limit if little time is left, else a preemption.
    """
    left_s = _seconds_left(job)
    if left_s is not None and left_s <= signal_s + _EARLY_S:
        reason, cause, most_s = "timeout", f"the time limit of job {job} came near", left_s
    else:
        reason, cause, most_s = "preempted", f"job {job} was preempted (SIGUSR2)", signal_s
    return Preemption(reason, cause, patience_s=max(most_s - _END_S, _END_S))


def after_sigterm(job: Allocation) -> Preemption | None:
    """Returns why Slurm ends this job; None if it shows no other reason than a user's scancel."""
    try:
        shown = scheduler.ask("scontrol", "show", "job", "-o", job.name, most_s=PATIENCE_S)
    except RunError:
        return None
    facts = scheduler.fields(shown)
    starts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    requeued = int(facts.get("Restarts", 0)) > starts
    state = facts.get("JobState", "")
    if requeued or state in ("NODE_FAIL", "COMPLETING"):
        names = ",".join(node.name for node in job.nodes)
        try:
            text = scheduler.ask("scontrol", "show", "node", names, "-o", most_s=PATIENCE_S)
        except RunError:
            text = ""
        gone = [
            one["NodeName"]
            for one in map(scheduler.fields, text.splitlines())
            if any(word in one.get("State", "") for word in _GONE_NODE)
        ]
        if gone or state == "NODE_FAIL":
            where = f"{' and '.join(gone)} went down" if gone else "a node went down"
            return Preemption("node", f"job {job.name} lost its nodes: {where}", requeued=requeued)
    if requeued or state == "PREEMPTED" or facts.get("PreemptTime", "") not in scheduler.NOTHING:
        cause = f"job {job.name} was preempted at once (SIGTERM)"
        return Preemption("preempted", cause, requeued=requeued)
    if state == "TIMEOUT":
        cause = f"the time limit of job {job.name} was reached"
        return Preemption("timeout", cause, requeued=requeued)
    return None


def _seconds_left(job: str) -> int | None:
    """Returns how long a job may still run; None if there is no limit, or Slurm does not answer."""
    try:
        text = scheduler.ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    except RunError:
        return None
    days, _, clock = text.rpartition("-")
    left_s = 0
    try:
        for part in clock.split(":"):  # seconds stand last, whatever stands before them
            left_s = 60 * left_s + int(part)
        return left_s + 86400 * int(days or 0)
    except ValueError:  # UNLIMITED, INVALID
        return None
