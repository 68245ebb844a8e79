"""What does this machine have, and what would mend what is missing?

Each check returns one line. torch is asked in processes of its own, so a broken torch is a line of
the answer and not the end of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hires.cli.choices import conf_dir
from hires.core.errors import HiresError
from hires.core.provenance import collect
from hires.core.units import gib

_TIMEOUT_S = 120
_ROOM_BYTES = 2**30

_TORCH = "import torch; print(torch.__version__, torch.get_num_threads())"
_GLOO = """\
import sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]),
                        world_size=2, timeout=datetime.timedelta(seconds=60))
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
sys.exit(x.item() != 2)
"""


@dataclass
class Check:
    """What one check found."""

    name: str
    state: str
    """``ok``, ``warn`` (works, with a limit) or ``fail`` (runs will fail)."""
    text: str
    remedy: str = ""
    """What would mend it."""


def all_checks() -> list[Check]:
    """Returns the lines of ``hires doctor``."""
    return [_python(), _packages(), _config(), _machine(), _torch(), _gloo(), _results(), _slurm()]


def _python() -> Check:
    """Which Python this is; an older one than hires supports could not have come this far."""
    version = ".".join(str(n) for n in sys.version_info[:3])
    return Check("python", "ok", f"{version} at {sys.executable}")


def _packages() -> Check:
    """Whether everything that hires imports is installed."""
    names = (
        "hydra-core",
        "omegaconf",
        "numpy",
        "pillow",
        "tifffile",
        "PyYAML",
        "rich",
        "safetensors",
        "submitit",
    )
    missing = []
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if not missing:
        return Check("packages", "ok", f"all {len(names)} are installed")
    return Check("packages", "fail", f"{', '.join(missing)} missing", "pip install hires again")


def _config() -> Check:
    """Whether the config files came along with the installation."""
    try:
        return Check("config", "ok", str(conf_dir()))
    except HiresError as error:
        return Check("config", "fail", str(error), "pip install hires again")


def _machine() -> Check:
    """What there is to compute with."""
    facts = collect()["hardware"]
    memory = gib(facts["memory"]) if facts["memory"] else "memory unknown"
    text = f"{facts['cores']} cores, {memory}, {facts['cpu']}"
    if facts["cores"] > 1:
        return Check("machine", "ok", text)
    return Check("machine", "warn", text, "ranks share one core: layouts run, but gain no speed")


def _torch() -> Check:
    """Whether torch can be imported."""
    code, text = _ask([sys.executable, "-c", _TORCH])
    if code == 0:
        version, threads = text.split()
        return Check("torch", "ok", f"{version}, {threads} threads in one process")
    return Check("torch", "fail", _last(text), "pip install torch==2.13.0")


def _gloo() -> Check:
    """Whether two processes of this machine can talk."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _GLOO, str(Path(folder) / "meet")]
        second = subprocess.Popen(
            [*command, "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            code, text = _ask([*command, "0"])
        finally:
            second.kill()
            second.wait()
    if code == 0:
        return Check("gloo", "ok", "two processes agreed on a sum")
    remedy = "set GLOO_SOCKET_IFNAME=lo, and let no firewall block this machine's own address"
    return Check("gloo", "fail", _last(text), remedy)


def _results() -> Check:
    """Whether run folders can be written here."""
    place = Path("results") if Path("results").is_dir() else Path()
    free = shutil.disk_usage(place).free
    text = f"{place.absolute()}, {gib(free)} free"
    if not os.access(place, os.W_OK):
        return Check("results", "fail", f"{text}, not writable", "choose results=FOLDER")
    if free < _ROOM_BYTES:
        return Check("results", "warn", text, "free some space, or choose results=FOLDER")
    return Check("results", "ok", text)


def _slurm() -> Check:
    """Whether this is a login node of a Slurm cluster."""
    where = shutil.which("sbatch")
    return Check("slurm", "ok", where or "not here; runs start on this machine")


def _ask(command: list[str]) -> tuple[int, str]:
    """Returns exit code and output of a process."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_TIMEOUT_S} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def _last(text: str) -> str:
    """Returns the last line of an output."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]
