"""Why did Slurm end a job that its user did not cancel?

Not every cluster tells a job by SIGUSR2 that it must make way: many end it by plain SIGTERM, as
``scancel`` does. What Slurm says about the job and its nodes at that moment tells these apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hires.core.errors import RunError
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import allocation
from hires.launcher.slurm.allocation import Allocation

PATIENCE_S = 3.0
"""How long Slurm may take to answer: soon after SIGTERM it sends SIGKILL."""
_GONE_NODE = ("DOWN", "FAIL", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN")
_NOTHING = ("", "None", "Unknown", "N/A")


def why(job: Allocation, environ: Mapping[str, str] | None = None) -> Preemption | None:
    """Returns why Slurm ends this job; None if it does not say that anybody but its user does.

    Args:
        job: the job that this process is part of.
        environ: its environment, which tells how often it was started before.
    """
    environ = os.environ if environ is None else environ
    try:
        told = _facts(allocation.ask("scontrol", "show", "job", "-o", job.name, most_s=PATIENCE_S))
    except RunError:
        return None
    before = int(environ.get("SLURM_RESTART_COUNT") or 0)
    queued = int(told.get("Restarts", 0)) > before
    state = told.get("JobState", "")
    if queued or state in ("NODE_FAIL", "COMPLETING"):
        gone = _gone_nodes(job)
        if gone or state == "NODE_FAIL":
            where = f"{' and '.join(gone)} went down" if gone else "a node went down"
            return Preemption("node", f"job {job.name} lost its nodes: {where}", requeued=queued)
    if queued or state == "PREEMPTED" or told.get("PreemptTime", "") not in _NOTHING:
        cause = f"job {job.name} had to make way at once (SIGTERM)"
        return Preemption("preempted", cause, requeued=queued)
    if state == "TIMEOUT":
        return Preemption(
            "timeout", f"the time limit of job {job.name} was reached", requeued=queued
        )
    return None


def _gone_nodes(job: Allocation) -> list[str]:
    """Returns the nodes of a job that Slurm has given up."""
    names = ",".join(node.name for node in job.nodes)
    try:
        text = allocation.ask("scontrol", "show", "node", names, "-o", most_s=PATIENCE_S)
    except RunError:
        return []
    facts = map(_facts, text.splitlines())
    return [
        one["NodeName"]
        for one in facts
        if "NodeName" in one and any(word in one.get("State", "") for word in _GONE_NODE)
    ]


def _facts(text: str) -> dict[str, str]:
    """Returns the fields of a line of scontrol."""
    return dict(re.findall(r"(\w+)=(\S*)", text))
