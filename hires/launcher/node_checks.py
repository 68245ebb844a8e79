"""Judges the reports of one rank on each node: whether these machines work together."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import hires
from hires.core.config.run_config import RunConfig
from hires.core.ranks import network
from hires.core.store.provenance import collect
from hires.core.units import seconds, size
from hires.launcher.doctor_check import FAILED, OK, WARNING, Check

Report = dict[str, Any]

_SKEW_S = 1.0
_SLOW_NET = 50e6
"""Bytes per second below which a network looks like the wrong one."""
_SLOW_DISK = 20e6
_SUM_BYTES = 2**22
"""What the ranks sum."""


def node_checks(
    config: RunConfig, facts: Sequence[Report], met: Sequence[Report], here_s: float
) -> list[Check]:
    """Returns the checks of the nodes.

    Args:
        config: of the job.
        facts: what every rank measured alone, see :mod:`hires.comm.node_report`.
        met: what every rank measured together with the others.
        here_s: by how much the file system's clock is ahead of this machine's.
    """
    if not facts:
        return []
    checks = [_versions(facts), _gpus(facts), _disk(facts), _clock(facts, met, here_s)]
    if len(met) < config.launcher.nodes:
        silent = config.launcher.nodes - len(met)
        text = f"{silent} of {config.launcher.nodes} ranks did not come to the end"
        remedy = "see the job's line; if they wait for each other, set launcher.interface=NAME"
        return [*checks, Check("network", FAILED, text, remedy, "job")]
    return [*checks, _shared(facts, met), _network(facts, met), _nccl(met)]


def _versions(facts: Sequence[Report]) -> Check:
    here = collect()
    wanted = {"hires": hires.__version__, "git": here["git"], "python": here["python"]}
    if here["torch"] is not None:
        wanted["torch"] = here["torch"]
    for key, value in wanted.items():
        for one in facts:
            if one[key] != value and not (key == "torch" and one[key].startswith(str(value))):
                text = f"{one['node']} has {key} {one[key]}, here it is {value}"
                remedy = "install the same on all nodes, best in a folder that all of them see"
                return Check("versions", FAILED, text, remedy, "job")
    text = ", ".join(f"{key} {value}" for key, value in wanted.items() if key != "git")
    return Check("versions", OK, f"{text} on all nodes and here", where="job")


def _gpus(facts: Sequence[Report]) -> Check:
    """Whether all nodes have the same GPUs, which read each other's memory."""
    counts = {one["node"]: len(one["gpus"]) for one in facts}
    if not any(counts.values()):
        return Check("gpus", OK, "none on any node; ranks compute on CPUs", where="job")
    text = ", ".join(f"{node}: {count}" for node, count in counts.items())
    if len(set(counts.values())) > 1:
        remedy = "ask for nodes of one kind (launcher.partition), and for their GPUs"
        return Check("gpus", WARNING, text, remedy, "job")
    apart = [one["node"] for one in facts if one["apart"]]
    if apart:
        remedy = "see `nvidia-smi topo -m` there; messages go through the host's memory"
        return Check("gpus", WARNING, f"{text}; not all are peers on {apart[0]}", remedy, "job")
    return Check("gpus", OK, f"{text}, {facts[0]['gpus'][0]}", where="job")


def _disk(facts: Sequence[Report]) -> Check:
    """How fast the nodes write where runs are kept."""
    slowest = min(facts, key=lambda one: one["bytes_per_s"])
    text = f"results take {size(slowest['bytes_per_s'])}/s from {slowest['node']}, the slowest"
    if slowest["bytes_per_s"] >= _SLOW_DISK:
        return Check("disk", OK, text, where="job")
    remedy = "checkpoints take long: save less often (checkpoint.every), or elsewhere (results=)"
    return Check("disk", WARNING, text, remedy, "job")


def _clock(facts: Sequence[Report], met: Sequence[Report], here_s: float) -> Check:
    """Whether the clocks agree: of the nodes with each other, and with the file system."""
    ahead = {facts[0]["node"]: 0.0, **_ahead(facts, met)}
    first = facts[0]
    # Rank 0 wrote its time within a second or so before the file got its own.
    offset_s = first["time"] - first["written"] + here_s
    far = {node: value for node, value in ahead.items() if abs(value) >= _SKEW_S}
    most = max(map(abs, ahead.values()))
    if far:
        node, value = max(far.items(), key=lambda item: abs(item[1]))
        text = f"{node} is {value:+.1f} s from {first['node']}"
    elif abs(offset_s) >= 5 * _SKEW_S:
        text = f"{first['node']} is {offset_s:+.1f} s from this machine"
    else:
        return Check("clock", OK, f"all nodes within {seconds(most)}", where="job")
    remedy = "set the clocks (chrony, ntpd): runs are fine, times in their logs are not"
    return Check("clock", WARNING, text, remedy, "job")


def _ahead(facts: Sequence[Report], met: Sequence[Report]) -> dict[str, float]:
    """Returns by how much every node's clock is ahead of the first one's."""
    names = {one["rank"]: one["node"] for one in facts}
    return {names[one["rank"]]: one["ahead_s"] for one in met if one["rank"] in names}


def _shared(facts: Sequence[Report], met: Sequence[Report]) -> Check:
    names = {one["rank"]: one["node"] for one in facts}
    blind = [(names[one["rank"]], one["unseen"]) for one in met if one["unseen"]]
    if not blind:
        return Check("shared", OK, "every node sees what the others write", where="job")
    node, unseen = blind[0]
    others = _names(names[rank] for rank in unseen if rank in names)
    remedy = "keep results= on a file system that all nodes mount at the same place"
    return Check("shared", FAILED, f"{node} does not see files of {others}", remedy, "job")


def _network(facts: Sequence[Report], met: Sequence[Report]) -> Check:
    """Whether sums over the network are right, and go over a network that others reach."""
    first = met[0]
    where = f"met at {first['address']}:{first['port']}"
    if first["interface"]:
        where += f", talk over {first['interface']}"
    several = len({one["host"] for one in facts}) > 1
    if several and network.is_loopback(first["address"]):
        text = f"{where}: an address of the machine itself"
        remedy = "set launcher.interface=NAME, the network that joins the nodes"
        return Check("network", FAILED, text, remedy, "job")
    times = [one["sum_s"] for one in met]
    if any(value is None for value in times):
        remedy = "a sum over all ranks is wrong: this is a bug of the network's driver or of torch"
        return Check("network", FAILED, f"{where}; a sum came out wrong", remedy, "job")
    rate = _SUM_BYTES / max(times)
    text = f"{where}; a sum of {size(_SUM_BYTES)} takes {seconds(max(times))}"
    text += "" if several else "; all nodes are one machine"
    if rate >= _SLOW_NET:
        return Check("network", OK, text, where="job")
    remedy = "is that the fast network? launcher.interface=NAME chooses another one, as ib0"
    return Check("network", WARNING, text, remedy, "job")


def _nccl(met: Sequence[Report]) -> Check:
    reports = [one["nccl"] for one in met if one["nccl"] is not None]
    if not reports:
        return Check("nccl", OK, "not tried: not every rank has a GPU", where="job")
    wrong = [one for one in reports if one.get("sum_s") is None]
    if wrong:
        why = wrong[0].get("error") or "a sum came out wrong"
        remedy = "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME names the network"
        return Check("nccl", FAILED, why, remedy, "job")
    slowest = max(one["sum_s"] for one in reports)
    return Check("nccl", OK, f"a sum of {size(_SUM_BYTES)} takes {seconds(slowest)}", where="job")


def _names(names: Iterable[str]) -> str:
    return " and ".join(collections.Counter(names)) or "others"
