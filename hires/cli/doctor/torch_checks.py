"""Checks torch on this machine: CUDA, NCCL, peer access, two processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

from hires.cli.doctor.machine_checks import python
from hires.launcher.doctor_check import FAILED, OK, WARNING, Check, ask, last

_TORCH = """\
import json, torch
cuda, devices = torch.cuda, []
if cuda.is_available():
    devices = [cuda.get_device_name(i) for i in range(cuda.device_count())]
pairs = [(i, j) for i in range(len(devices)) for j in range(len(devices)) if i != j]
facts = {"version": torch.__version__, "threads": torch.get_num_threads(), "devices": devices}
facts["cuda"] = torch.version.cuda
facts["apart"] = [pair for pair in pairs if not cuda.can_device_access_peer(*pair)]
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
facts["nccl"] = ".".join(map(str, cuda.nccl.version())) if nccl and devices else None
print(json.dumps(facts))
"""
_GLOO = """\
import sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]),
                        world_size=2, timeout=datetime.timedelta(seconds=60))
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
sys.exit(x.item() != 2)
"""


def torch_checks() -> list[Check]:
    """Returns the lines about torch; one line if it cannot be imported."""
    code, text = python(_TORCH)
    if code:
        return [Check("torch", FAILED, last(text), "pip install torch again, see constraints.txt")]
    facts = json.loads(last(text))
    version = f"{facts['version']}, {facts['threads']} threads in one process"
    return [Check("torch", OK, version), *_gpus(facts), _tensorrt(), _gloo()]


def _gpus(facts: dict[str, Any]) -> list[Check]:
    devices = facts["devices"]
    if not devices:
        if facts["cuda"] is None:
            return [Check("cuda", OK, "this torch is for CPUs; ranks compute there")]
        remedy = "fine without a GPU; with one, `nvidia-smi` must list it (driver, permissions)"
        text = f"this torch is for CUDA {facts['cuda']} and finds no GPU"
        return [Check("cuda", WARNING, text, remedy)]
    checks = [Check("cuda", OK, f"CUDA {facts['cuda']}: {len(devices)} x {devices[0]}")]
    if facts["nccl"] is None:
        remedy = "install a torch with NCCL; until then GPUs talk over gloo"
        checks.append(Check("nccl", WARNING, "this torch has no NCCL", remedy))
    else:
        checks.append(Check("nccl", OK, facts["nccl"]))
    if len(devices) > 1:
        checks.append(_peers(facts["apart"], len(devices)))
    return checks


def _peers(apart: list[list[int]], count: int) -> Check:
    if not apart:
        return Check("peers", OK, f"all {count} GPUs read each other's memory")
    first = " and ".join(map(str, apart[0]))
    text = f"{len(apart)} of {count * (count - 1)} pairs of GPUs do not, as {first}"
    remedy = "see `nvidia-smi topo -m`; messages between them go through the host's memory"
    return Check("peers", WARNING, text, remedy)


def _tensorrt() -> Check:
    """Whether TensorRT is here, which nothing needs."""
    if util.find_spec("tensorrt") is None:
        return Check("tensorrt", OK, "not here, and not needed")
    code, text = python("import tensorrt; print(tensorrt.__version__)")
    if code:
        return Check(
            "tensorrt", WARNING, last(text), "install it again, or remove it: it is optional"
        )
    return Check("tensorrt", OK, last(text))


def _gloo() -> Check:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _GLOO, str(Path(folder) / "meet")]
        second = subprocess.Popen(
            [*command, "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            code, text = ask(*command, "0")
        finally:
            second.kill()
            second.wait()
    if code == 0:
        return Check("gloo", OK, "two processes agreed on a sum")
    remedy = "set GLOO_SOCKET_IFNAME=lo, and let no firewall block this machine's own address"
    return Check("gloo", FAILED, last(text), remedy)
