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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hires
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError, RunError
from hires.core.ranks import meeting
from hires.core.store import file_names, reading
from hires.core.store.ends import End, State
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.naming import plain
from hires.core.store.provenance import collect
from hires.core.store.reading import yaml_text
from hires.core.store.rundir import RunDir
from hires.core.units import seconds
from hires.launcher.interface import FAILED, OK, WARNING, Check
from hires.launcher.slurm import scheduler, submission
from hires.launcher.status.run_progress import last_lines
from hires.launcher.supervision.supervisor import Interrupts
from hires.plan.hardware import CUDA

Report = dict[str, Any]
"""What the rank of a node has measured."""
LOOK_S = 0.5
_SKEW_S = 1.0
_SLOW_SUM_S = 0.08
"""Of 4 MiB: a network that takes as long looks like the wrong one."""
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
    wanted, partition = config.launcher.nodes, config.partition
    words = [] if partition is None else [f"--partition={partition}"]
    try:
        text = scheduler.ask("sinfo", "--noheader", "--Node", "--format=%N|%P|%t", *words)
    except RunError as error:
        return Check("nodes", WARNING, str(error), "`scontrol ping` says more")
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    if partition is None:  # the cluster's default, if it has one
        rows = [row for row in rows if row[1].endswith("*")] or rows
    names, up = {row[0] for row in rows}, {row[0] for row in rows if _UP.match(row[2])}
    place = f"partition {rows[0][1].rstrip('*') if rows else partition}"
    if wanted <= len(up):
        return Check("nodes", OK, f"{len(up)} of {len(names)} nodes of {place} are up")
    if wanted > len(names):
        text = f"{place} has {len(names)} nodes in all, and {wanted} are wanted"
        return Check("nodes", FAILED, text, "use fewer launcher.nodes, or another partition")
    text = f"{len(up)} of {len(names)} nodes of {place} are up, {wanted} are wanted"
    remedy = "`sinfo -R` says why nodes are down; choose another launcher.partition or fewer nodes"
    return Check("nodes", WARNING, text, remedy)


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
        wait, outcome = submission.JobWait(RunDir(folder, 0), job), None
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
        checks = [*_job_checks(folder, config, job, outcome)]
    if all(check.state != FAILED for check in checks):
        shutil.rmtree(folder, ignore_errors=True)
    return checks


def _job_checks(folder: Path, config: RunConfig, job: str, outcome: End) -> Iterator[Check]:
    reports = reading.read_json(folder / file_names.NODES, []).get("nodes") or []
    if outcome.state == State.DONE and reports:
        nodes = ", ".join(one["node"] for one in reports)
        yield Check("job", OK, f"{job} ran on {nodes}", where="job")
        yield from node_checks(config, reports)
        return
    logs = [folder / file_names.JOB_LOG, *file_names.rank_logs(folder / "a0").values()]
    lines = [line.strip() for path in logs for line in last_lines(path, _TAIL)]
    tail = " | ".join(filter(None, lines)) or "no output"
    remedy = (
        f"its files: {folder}; if ranks wait for each other, set launcher.interface=NAME; {tail}"
    )
    yield Check("job", FAILED, f"{job}: {outcome.cause}", remedy, "job")


def node_checks(config: RunConfig, reports: Sequence[Report]) -> Iterator[Check]:
    """Yields the checks of a job's nodes, by the reports of ``comm.node_report``."""
    for check in (_versions, _gpus, _clock, _shared, _network):
        state, text, remedy = check(reports, config)
        yield Check(check.__name__[1:], state, text, remedy, "job")


def _versions(reports: Sequence[Report], config: RunConfig) -> tuple[str, str, str]:
    here = collect()
    wanted = {"hires": hires.__version__, "git": here["git"], "python": here["python"]}
    if here["torch"] is not None:
        wanted["torch"] = here["torch"]
    for key, value in wanted.items():
        for one in reports:
            if one[key] != value and not (key == "torch" and one[key].startswith(str(value))):
                text = f"{one['node']} has {key} {one[key]}, here it is {value}"
                remedy = "install the same on all nodes, best in a folder that all of them see"
                return FAILED, text, remedy
    text = ", ".join(f"{key} {value}" for key, value in wanted.items() if key != "git")
    return OK, f"{text} on all nodes and here", ""


def _gpus(reports: Sequence[Report], config: RunConfig) -> tuple[str, str, str]:
    counts = {one["node"]: len(one["gpus"]) for one in reports}
    text = "GPUs: " + ", ".join(f"{node}: {count}" for node, count in counts.items())
    if config.device == CUDA and not all(counts.values()):
        remedy = "request them (cluster.options.gres=gpu:N), and install a torch with CUDA"
        return FAILED, f"{text}, but device=cuda", remedy
    if len(set(counts.values())) > 1:
        return WARNING, text, "ask for nodes of one kind (launcher.partition), and for their GPUs"
    return OK, text, ""


def _clock(reports: Sequence[Report], config: RunConfig) -> tuple[str, str, str]:
    first = reports[0]
    other = max(reports, key=lambda one: abs(one["time"] - first["time"]))
    ahead_s = other["time"] - first["time"]
    if abs(ahead_s) < _SKEW_S:
        return OK, f"all nodes within {seconds(abs(ahead_s))}", ""
    remedy = "set the clocks (chrony, ntpd): runs are fine, times in their logs are not"
    return WARNING, f"{other['node']} is {ahead_s:+.1f} s from {first['node']}", remedy


def _shared(reports: Sequence[Report], config: RunConfig) -> tuple[str, str, str]:
    blind = [one["node"] for one in reports if not one["sees"]]
    if not blind:
        return OK, "every node sees what the first one writes", ""
    remedy = "keep results= on a file system that all nodes mount at the same place"
    text = f"{' and '.join(blind)} does not see files of {reports[0]['node']}"
    return FAILED, text, remedy


def _network(reports: Sequence[Report], config: RunConfig) -> tuple[str, str, str]:
    first, times = reports[0], [one["sum_s"] for one in reports]
    where = f"met at {first['address']}"
    where += f", talk over {first['interface']}" if first["interface"] else ""
    several = len({one["host"] for one in reports}) > 1
    if several and meeting.is_loopback(first["address"]):
        remedy = "set launcher.interface=NAME, the network that joins the nodes"
        return FAILED, f"{where}: an address of the machine itself", remedy
    if None in times:
        remedy = "this is a bug of the network's driver or of torch"
        return FAILED, f"{where}; a sum over all ranks came out wrong", remedy
    text = f"{where}; a sum of 4 MiB takes {seconds(max(times))}"
    if max(times) <= _SLOW_SUM_S:
        return OK, text if several else f"{text}; all nodes are one machine", ""
    remedy = "is that the fast network? launcher.interface=NAME chooses another one, as ib0"
    return WARNING, text, remedy
