"""Checks for ``hires doctor``: whether Slurm answers, and what a small job finds on its nodes.

hires doctor    submits a job, waits for it, and judges the files that it leaves
the job         python -m hires.launcher.slurm.job FOLDER 0 --checkup, on its first node
each node       one rank of hires.comm.node_report, started exactly as the ranks of a run
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.store import file_names, reading
from hires.core.store.ends import End, State
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.naming import plain
from hires.core.store.reading import yaml_text
from hires.core.store.rundir import RunDir
from hires.launcher.doctor_check import FAILED, OK, WARNING, Check, node_checks
from hires.launcher.interface import launcher_named
from hires.launcher.job_wait import JobWait
from hires.launcher.ranks.rank_group import last_lines
from hires.launcher.slurm import scheduler, submission
from hires.launcher.supervision.interrupts import Interrupts

LOOK_S = 0.5
_UP = re.compile(r"^(idle|mix|alloc|comp)", re.IGNORECASE)
_MINUTES = 10
_TAIL = 5


def slurm_checks(config: RunConfig) -> list[Check]:
    """Returns the lines about Slurm; one if it is not here."""
    where, is_wanted = shutil.which("sbatch"), config.launcher.name == "slurm"
    if where is None and not is_wanted:
        return [Check("slurm", OK, "not here; runs start on this machine")]
    if where is None:
        remedy = "log in to a machine of the cluster, or leave launcher=slurm out"
        return [Check("slurm", FAILED, "there is no sbatch here", remedy)]
    try:
        facts = scheduler.config()
    except RunError as error:
        text = f"{where}, but it does not answer: {error}"
        remedy = "`scontrol ping` says more; is slurmctld up, is SLURM_CONF that of the cluster?"
        return [Check("slurm", FAILED if is_wanted else WARNING, text, remedy)]
    kind = facts.get("AccountingStorageType", "").rpartition("/")[2]
    summary = (
        f"{facts.get('SLURM_VERSION', 'of some version')}, cluster {facts.get('ClusterName')}, "
        f"arrays below {facts.get('MaxArraySize', '?')}, accounting {kind or 'none'}"
    )
    return [Check("slurm", OK, summary), _nodes(config)]


def _nodes(config: RunConfig) -> Check:
    wanted = config.launcher.nodes
    words = [] if config.partition is None else [f"--partition={config.partition}"]
    try:
        text = scheduler.ask("sinfo", "--noheader", "--Node", "--format=%N|%P|%t", *words)
    except RunError as error:
        return Check("nodes", WARNING, str(error), "`scontrol ping` says more")
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    if not words and any(row[1].endswith("*") for row in rows):
        rows = [row for row in rows if row[1].endswith("*")]
    partition = rows[0][1].rstrip("*") if rows else config.partition
    names = {row[0] for row in rows}
    up = {row[0] for row in rows if _UP.match(row[2])}
    summary = f"{len(up)} of {len(names)} nodes of partition {partition} are up"
    if wanted <= len(up):
        return Check("nodes", OK, summary)
    if wanted > len(names):
        summary = f"partition {partition} has {len(names)} nodes in all, and {wanted} are wanted"
        fewer = f"--nodes {len(names)} (launcher.nodes) or less, or " if names else ""
        return Check("nodes", FAILED, summary, f"use {fewer}another launcher.partition")
    remedy = "`sinfo -R` says why nodes are down; choose another launcher.partition or fewer nodes"
    return Check("nodes", WARNING, f"{summary}, {wanted} are wanted", remedy)


def cluster_checks(config: RunConfig, argv: Sequence[str], patience_s: float) -> list[Check]:
    """Returns what one rank on each node of a job finds, see ``Launcher.node_checks``."""
    launcher = dataclasses.replace(config.launcher, minutes=_MINUTES, signal_s=10)
    config = dataclasses.replace(config, launcher=launcher)
    from hires.launcher.slurm.job_script import write_script

    folder = Path(config.results).absolute() / f".doctor-{uuid.uuid4().hex[:8]}"
    with Interrupts() as interrupts:  # a job that was submitted is always cancelled
        try:
            # A folder that looks like that of a run.
            make_folder(folder / "a0" / file_names.LOGS)
            text = yaml_text(plain(config))
            write_atomically(folder / file_names.CONFIG, text)
            write_atomically(folder / file_names.PLAN, json.dumps({"world": launcher.nodes}))
            write_script(folder, config, launcher.nodes, argv)
            job = submission.submit_run(folder, 0, config, None, submission.CHECKUP)
        except HiresError as error:
            shutil.rmtree(folder, ignore_errors=True)
            return [Check("job", FAILED, str(error), "fix the cause that Slurm names", "job")]
        sys.stderr.write(f"job {job} checks {launcher.nodes} nodes\n")
        wait, outcome = JobWait(launcher_named("slurm"), RunDir(folder, 0), job), None
        until_s = time.monotonic() + patience_s
        try:
            while outcome is None and not interrupts.count and time.monotonic() < until_s:
                time.sleep(LOOK_S)
                outcome = wait.poll()
        finally:
            if outcome is None:
                with contextlib.suppress(HiresError):
                    scheduler.cancel([{"job": job}])
        if interrupts.count:
            raise KeyboardInterrupt
        if outcome is None:
            reason = f" ({wait.status.reason})" if wait.status.reason else ""
            cause = f"after {patience_s:g} s it is {wait.status.state}{reason}; it was cancelled"
            outcome = End(State.CANCELLED, cause)
        checks = _job_checks(folder, config, job, outcome)
    if all(check.state != FAILED for check in checks):
        shutil.rmtree(folder, ignore_errors=True)
    return checks


def _job_checks(folder: Path, config: RunConfig, job: str, outcome: End) -> list[Check]:
    facts, met = _reports(folder, "facts"), _reports(folder, "met")
    if outcome.state == "done":
        nodes = ", ".join(one["node"] for one in facts) or "no node"
        head = Check("job", OK, f"{job} ran on {nodes}", where="job")
    else:
        logs = [folder / file_names.JOB_LOG, *file_names.rank_logs(folder / "a0").values()]
        lines = [line.strip() for path in logs for line in last_lines(path, _TAIL)]
        tail = " | ".join(filter(None, lines)) or "no output"
        remedy = f"its files: {folder}; {tail}"
        head = Check("job", FAILED, f"{job}: {outcome.cause}", remedy, "job")
    here_s = heartbeat.file_clock(folder) - time.time()
    return [head, *node_checks(config, facts, met, here_s)]


def _reports(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the files of the ranks, in their order, with the file system's time of each."""
    reports = []
    for path in sorted(folder.glob(f"{kind}-rank*.json")):
        values = reading.read_json(path, [])
        if values:
            reports.append({**values, "rank": int(path.stem[-4:]), "written": path.stat().st_mtime})
    return reports
