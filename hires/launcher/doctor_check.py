"""Defines one line of ``hires doctor``, and judges the reports of the nodes of a job."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hires
from hires.core import programs
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import network
from hires.core.store.provenance import collect
from hires.core.units import seconds, size
from hires.plan.hardware import CUDA

OK, WARNING, FAILED = "ok", "warning", "failed"
Report = dict[str, Any]
_TIMEOUT_S = 120
_SKEW_S = 1.0
_SLOW_NET = 50e6
"""Bytes per second below which a network looks like the wrong one."""
_SLOW_DISK = 20e6
_SUM_BYTES = 2**22
"""What the ranks sum."""


@dataclass
class Check:
    """The result of one check."""

    name: str
    state: str
    """``ok``, ``warning`` (works, with a limit) or ``failed`` (runs will fail)."""
    text: str
    remedy: str = ""
    """What would help."""
    where: str = "here"
    """Which machine it is about: ``here``, a node, or ``job``: all nodes together."""


_of_job = functools.partial(Check, where="job")


def ask(*command: str, most_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Returns exit code and output of a program, of one that failed its errors."""
    try:
        done = programs.run(*command, most_s=most_s)
    except RunError as error:  # the codes of a shell for what is missing or took too long
        return (127 if isinstance(error, programs.MissingProgramError) else 124), str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout


def last(text: str, otherwise: str = "no output") -> str:
    """Returns the last line of an output, where programs say why they failed."""
    return (text.strip().splitlines() or [otherwise])[-1]


def node_checks(
    config: RunConfig, facts: Sequence[Report], met: Sequence[Report], here_s: float
) -> list[Check]:
    """Returns the checks of a job's nodes, by what every rank of ``comm.node_report`` measured.

    That is ``facts`` alone, ``met`` with the others; the file system's clock is ``here_s`` ahead.
    """
    if not facts:
        return []
    names = {one["rank"]: one["node"] for one in facts}
    checks = [
        _versions(facts),
        _gpus(facts, config.device),
        _disk(facts),
        _clock(facts, met, names, here_s),
    ]
    nodes = config.launcher.nodes
    if len(met) < nodes:
        text = f"{nodes - len(met)} of {nodes} ranks did not come to the end"
        remedy = "see the job's line; if they wait for each other, set launcher.interface=NAME"
        checks.append(_of_job("network", FAILED, text, remedy))
    else:
        checks += [_shared(met, names), _network(facts, met), _nccl(met)]
    return checks


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
                return _of_job("versions", FAILED, text, remedy)
    text = ", ".join(f"{key} {value}" for key, value in wanted.items() if key != "git")
    return _of_job("versions", OK, f"{text} on all nodes and here")


def _gpus(facts: Sequence[Report], device: str) -> Check:
    """Whether all nodes have the same GPUs, which read each other's memory."""
    counts = {one["node"]: len(one["gpus"]) for one in facts}
    if not any(counts.values()) and device == CUDA:
        remedy = "request them (cluster.options.gres=gpu:N), and install a torch with CUDA"
        return _of_job("gpus", FAILED, "torch finds none on any node, but device=cuda", remedy)
    if not any(counts.values()):
        return _of_job("gpus", OK, "none on any node; ranks compute on CPUs")
    text = ", ".join(f"{node}: {count}" for node, count in counts.items())
    if len(set(counts.values())) > 1:
        remedy = "ask for nodes of one kind (launcher.partition), and for their GPUs"
        return _of_job("gpus", WARNING, text, remedy)
    apart = [one["node"] for one in facts if one["apart"]]
    if apart:
        remedy = "see `nvidia-smi topo -m` there; messages go through the host's memory"
        return _of_job("gpus", WARNING, f"{text}; not all are peers on {apart[0]}", remedy)
    return _of_job("gpus", OK, f"{text}, {facts[0]['gpus'][0]}")


def _disk(facts: Sequence[Report]) -> Check:
    slowest = min(facts, key=lambda one: one["bytes_per_s"])
    text = f"results take {size(slowest['bytes_per_s'])}/s from {slowest['node']}, the slowest"
    if slowest["bytes_per_s"] >= _SLOW_DISK:
        return _of_job("disk", OK, text)
    remedy = "checkpoints take long: save less often (checkpoint.every), or elsewhere (results=)"
    return _of_job("disk", WARNING, text, remedy)


def _clock(
    facts: Sequence[Report], met: Sequence[Report], names: dict[int, str], here_s: float
) -> Check:
    """Whether the clocks agree: of the nodes with each other, and with the file system."""
    first = facts[0]
    ahead = {first["node"]: 0.0}
    ahead |= {names[one["rank"]]: one["ahead_s"] for one in met if one["rank"] in names}
    # Rank 0 wrote its time within a second or so before the file got its own.
    offset_s = first["time"] - first["written"] + here_s
    node, value = max(ahead.items(), key=lambda item: abs(item[1]))
    if abs(value) >= _SKEW_S:
        text = f"{node} is {value:+.1f} s from {first['node']}"
    elif abs(offset_s) >= 5 * _SKEW_S:
        text = f"{first['node']} is {offset_s:+.1f} s from this machine"
    else:
        return _of_job("clock", OK, f"all nodes within {seconds(abs(value))}")
    remedy = "set the clocks (chrony, ntpd): runs are fine, times in their logs are not"
    return _of_job("clock", WARNING, text, remedy)


def _shared(met: Sequence[Report], names: dict[int, str]) -> Check:
    for one in met:
        if one["unseen"]:
            others = dict.fromkeys(names[rank] for rank in one["unseen"] if rank in names)
            text = f"{names[one['rank']]} does not see files of {' and '.join(others) or 'others'}"
            remedy = "keep results= on a file system that all nodes mount at the same place"
            return _of_job("shared", FAILED, text, remedy)
    return _of_job("shared", OK, "every node sees what the others write")


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
        return _of_job("network", FAILED, text, remedy)
    times = [one["sum_s"] for one in met]
    if any(value is None for value in times):
        remedy = "a sum over all ranks is wrong: this is a bug of the network's driver or of torch"
        return _of_job("network", FAILED, f"{where}; a sum came out wrong", remedy)
    text = f"{where}; a sum of {size(_SUM_BYTES)} takes {seconds(max(times))}"
    text += "" if several else "; all nodes are one machine"
    if _SUM_BYTES / max(times) >= _SLOW_NET:
        return _of_job("network", OK, text)
    remedy = "is that the fast network? launcher.interface=NAME chooses another one, as ib0"
    return _of_job("network", WARNING, text, remedy)


def _nccl(met: Sequence[Report]) -> Check:
    reports = [one["nccl"] for one in met if one["nccl"] is not None]
    if not reports:
        return _of_job("nccl", OK, "not tried: not every rank has a GPU")
    wrong = [one for one in reports if one.get("sum_s") is None]
    if wrong:
        why = wrong[0].get("error") or "a sum came out wrong"
        remedy = "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME names the network"
        return _of_job("nccl", FAILED, why, remedy)
    slowest = max(one["sum_s"] for one in reports)
    return _of_job("nccl", OK, f"a sum of {size(_SUM_BYTES)} takes {seconds(slowest)}")
