"""Checks what this machine has.

Each check returns one line. What might crash, as a torch that cannot be loaded, runs in a process
of its own, so that it becomes a line of the answer and not the end of it.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from hires.cli.compose.choices import conf_dir
from hires.core.errors import HiresError
from hires.core.ranks import heartbeat, network
from hires.core.store.provenance import collect
from hires.core.units import gib, size
from hires.launcher.doctor_check import FAILED, OK, WARNING, Check, ask

_ROOM_BYTES = 2**30
_PROBE_BYTES = 2**25
"""Bytes that are written to measure the speed of a folder."""
_SLOW_BYTES_PER_S = 20e6
_SKEW_S = 5.0
_PACKAGES = (
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


def guarded(name: str, ask: Callable[[], Check]) -> Check:
    """Returns the result of a check; one that raises has failed, and the others go on."""
    try:
        return ask()
    except (OSError, ValueError, KeyError, HiresError, subprocess.SubprocessError) as error:
        why = f"the check itself failed: {type(error).__name__}: {error}"
        return Check(name, FAILED, why, "fix the cause, or report it as a bug of hires")


def machine_checks(results: Path, nodes: int) -> list[Check]:
    """Returns the lines about this machine that need no torch.

    Args:
        results: folder of all runs.
        nodes: machines that runs are to use.
    """
    return [
        _python(),
        _packages(),
        _config(),
        _machine(),
        guarded("results", lambda: _results(results)),
        guarded("clock", lambda: _clock(results)),
        guarded("address", lambda: _address(nodes)),
    ]


def _python() -> Check:
    """Which Python this is; an older one than hires supports could not have come this far."""
    version = ".".join(str(n) for n in sys.version_info[:3])
    return Check("python", OK, f"{version} at {sys.executable}")


def _packages() -> Check:
    missing = []
    for name in _PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if not missing:
        return Check("packages", OK, f"all {len(_PACKAGES)} are installed")
    return Check("packages", FAILED, f"{', '.join(missing)} missing", "pip install hires again")


def _config() -> Check:
    try:
        return Check("config", OK, str(conf_dir()))
    except HiresError as error:
        return Check("config", FAILED, str(error), "pip install hires again")


def _machine() -> Check:
    facts = collect()["hardware"]
    memory = gib(facts["memory"]) if facts["memory"] else "memory unknown"
    text = f"{facts['cores']} cores, {memory}, {facts['cpu']}"
    if facts["cores"] > 1:
        return Check("machine", OK, text)
    return Check("machine", WARNING, text, "ranks share one core: layouts run, but gain no speed")


def _results(results: Path) -> Check:
    """Whether run folders can be written here, how much fits, and how fast it goes."""
    place = _existing(results)
    free = shutil.disk_usage(place).free
    text = f"{results.absolute()}, {gib(free)} free"
    try:
        rate = _write_rate(place)
    except OSError as error:
        text = f"{text}, not writable ({error.strerror})"
        return Check("results", FAILED, text, "choose results=FOLDER, or free some space")
    text += f", takes {size(rate)}/s"
    if free < _ROOM_BYTES:
        return Check("results", WARNING, text, "free some space, or choose results=FOLDER")
    if rate < _SLOW_BYTES_PER_S:
        remedy = (
            "checkpoints take long: save less often (checkpoint.every), or elsewhere (results=)"
        )
        return Check("results", WARNING, text, remedy)
    return Check("results", OK, text)


def _existing(folder: Path) -> Path:
    """Returns a folder, or the first one above it that exists."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _write_rate(folder: Path) -> float:
    """Returns how many bytes per second reach the disk of a folder.

    Raises:
        OSError: nothing can be written there.
    """
    probe = folder / f".doctor-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    data = os.urandom(2**20)  # a disk may compress zeros
    began_s = time.perf_counter()
    try:
        with probe.open("xb") as file:
            for _ in range(_PROBE_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _PROBE_BYTES / (time.perf_counter() - began_s)
    finally:
        probe.unlink(missing_ok=True)


def _clock(results: Path) -> Check:
    """Whether this machine's clock and that of the results' file system agree."""
    ahead_s = heartbeat.file_clock(_existing(results)) - time.time()
    text = f"the file system of the results is {abs(ahead_s):.1f} s "
    text += "ahead of this machine" if ahead_s > 0 else "behind this machine"
    if abs(ahead_s) < _SKEW_S:
        return Check("clock", OK, text)
    remedy = "set both clocks (chrony, ntpd); hires goes by the file system's own, so runs are fine"
    return Check("clock", WARNING, text, remedy)


def _address(nodes: int) -> Check:
    """Where ranks meet: the address that this host's name leads to, and whether a port is free."""
    name = socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        probe.listen(1)
        port = probe.getsockname()[1]
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"the name of this host, {name}, leads nowhere ({error.strerror})"
        if nodes == 1:
            return Check("address", OK, f"{text}; ranks on one machine meet at 127.0.0.1")
        return Check("address", FAILED, text, "add it to DNS or to /etc/hosts of all nodes")
    text = f"{name} is {address}; port {port} is free"
    if nodes > 1 and network.is_loopback(address):
        remedy = "let the name lead to the network's address, or set launcher.interface=NAME"
        return Check("address", WARNING, f"{text}; no other machine reaches that", remedy)
    return Check("address", OK, text)


python = functools.partial(ask, sys.executable, "-c")
"""Runs a piece of Python in a process of its own."""
