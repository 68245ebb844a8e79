"""Checks whether Slurm is here, answers, and keeps accounts."""

from __future__ import annotations

import re
import shutil

from hires.cli.doctor.machine_checks import FAILED, OK, WARNING, Check, ask, last
from hires.core.config.run_config import RunConfig

_UP = re.compile(r"^(idle|mix|alloc|comp)", re.IGNORECASE)


def slurm_checks(config: RunConfig) -> list[Check]:
    """Returns the lines about Slurm; one if it is not here.

    Args:
        config: its launcher says how many nodes of which partition are wanted, and whether Slurm
            is to be used at all.
    """
    where = shutil.which("sbatch")
    if where is None:
        if config.launcher.name != "slurm":
            return [Check("slurm", OK, "not here; runs start on this machine")]
        remedy = "log in to a machine of the cluster, or leave launcher=slurm out"
        return [Check("slurm", FAILED, "there is no sbatch here", remedy)]
    code, text = ask("scontrol", "show", "config", most_s=60)
    if code:
        state = FAILED if config.launcher.name == "slurm" else WARNING
        remedy = "`scontrol ping` says more; is slurmctld up, is SLURM_CONF that of the cluster?"
        return [Check("slurm", state, f"{where}, but it does not answer: {last(text)}", remedy)]
    facts = {key.strip(): value.strip() for key, _, value in map(_parted, text.splitlines())}
    summary = f"{facts.get('SLURM_VERSION', 'of some version')}, cluster {facts.get('ClusterName')}"
    summary += f", arrays below {facts.get('MaxArraySize', '?')}"
    return [Check("slurm", OK, summary), _accounting(facts), _nodes(config)]


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition("=")


def _accounting(facts: dict[str, str]) -> Check:
    """Whether Slurm keeps accounts; hires works with and without them."""
    kind = facts.get("AccountingStorageType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        return Check("accounting", OK, "absent; ends of runs come from their folders and squeue")
    code, text = ask("sacct", "--noheader", "--allocations", "--format=JobID", most_s=60)
    if code == 0:
        return Check("accounting", OK, f"{kind}, sacct answers")
    remedy = "ask the site about slurmdbd; hires goes on without it"
    return Check("accounting", WARNING, f"{kind}, but sacct says: {last(text)}", remedy)


def _nodes(config: RunConfig) -> Check:
    wanted, words = config.launcher.nodes, []
    if config.partition is not None:
        words = [f"--partition={config.partition}"]
    code, text = ask("sinfo", "--noheader", "--Node", "--format=%N|%P|%t", *words, most_s=60)
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    if code:
        return Check("nodes", WARNING, f"sinfo says: {last(text)}", "`scontrol ping` says more")
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
