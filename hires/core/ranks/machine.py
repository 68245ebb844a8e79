"""Finds what this machine offers: GPUs, torch, compilers; binds a rank to its share of it.

Nothing here imports torch, which takes seconds: the front end needs this before anything starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hires.core.programs import adding

if TYPE_CHECKING:
    from hires.core.config.run_config import RunConfig
    from hires.core.ranks.world import World

TENSORRT = "tensorrt"
"""``engine.compile`` that builds engines of TensorRT."""
ENGINE_PACKAGES = ("torch_tensorrt", "tensorrt")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that limits the GPUs of a process."""

_DEV = Path("/dev")
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


class Torch(NamedTuple):
    """The installed torch, as its files describe it."""

    version: str
    cuda: str | None
    """Version of CUDA that it was built for; None: it computes on CPUs only."""


def visible_gpus(gpus: int | None = None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of the GPUs that a process may use, in the order of CUDA.

    They are the first ``gpus``, or all, of those that CUDA_VISIBLE_DEVICES names; without it, of
    those that this machine shows. As in CUDA, a name that is none (as -1) hides those behind it.

    >>> visible_gpus(4, {}), visible_gpus(4, {"CUDA_VISIBLE_DEVICES": "2,-1,3"})
    (['0', '1', '2', '3'], ['2'])
    >>> visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "2,3"})
    ['2']
    """
    visible = environ.get(VISIBLE)
    if visible is None:
        return [str(number) for number in range(device_files() if gpus is None else gpus)]
    names: list[str] = []
    for name in visible.split(","):
        if not _NAME.fullmatch(name.strip()):
            break
        names.append(name.strip())
    return names[:gpus]


def device_files() -> int:
    """Returns how many NVIDIA GPUs the system offers to programs."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in _DEV.glob("nvidia*"))


def installed_torch() -> Torch | None:
    """Returns the installed torch without importing it; None: there is none."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = find_spec("torch")
        if spec is not None and spec.origin is not None:
            return torch_of((Path(spec.origin).parent / "version.py").read_text(errors="replace"))
    return None


def torch_of(text: str) -> Torch:
    r"""Returns what torch/version.py says.

    >>> torch_of("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'")
    Torch(version='2.13.0+cu130', cuda='13.0')
    """
    facts = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.M))
    return Torch(facts.get("__version__", "of an unknown version"), facts.get("cuda"))


def missing_compiler(device: str, mode: str = "stage") -> str | None:
    """Returns what ``engine.compile`` lacks on this machine, and the remedy; None: nothing."""
    if mode == TENSORRT:
        if all(map(find_spec, ENGINE_PACKAGES)):
            return None
        return f"Torch-TensorRT is not installed; {adding('tensorrt')}"
    if device == "cuda":
        if find_spec("triton") is None:
            return "Triton is not installed; install the triton that belongs to torch"
        name, variable, program = "C", "CC", os.environ.get("CC") or "gcc"
        # Triton takes CC, whatever it names; without it one of these.
        candidates = [program] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    else:
        name, variable, program = "C++", "CXX", os.environ.get("CXX") or "g++"
        candidates = [program]
    if not any(map(shutil.which, candidates)):
        return f"there is no {name} compiler ({program}); install g++, or set {variable}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python.h is missing; install the headers of this Python, as python3-dev"
    return None


_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Binding:
    """The share of its machine that a rank is bound to."""

    host: str
    local_rank: int
    threads: int
    cores: list[int]
    """Numbers of the cores that it may use."""
    bound: bool
    """Whether those are its own share; else all that the machine or the job has."""
    devices: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""


def bind(world: World, config: RunConfig) -> Binding:
    """Binds this process, and all threads that it starts from now on, to its share."""
    threads = config.launcher.threads
    cores = sorted(os.sched_getaffinity(0))
    # Cores that share a processor, or are hardware threads of one core, stand side by side.
    neighbours = sorted(
        cores, key=lambda core: (_fact(core, "physical_package_id"), _fact(core, "core_id"), core)
    )
    least = threads + (1 if config.is_here else 0)
    share = share_of(neighbours, world.local_rank, world.local_size)
    bound = config.launcher.bind == "auto" and least <= len(share) < len(cores)
    if bound:
        try:
            os.sched_setaffinity(0, share)
        except OSError:
            bound = False  # the system does not allow it
    devices = os.environ.get(VISIBLE)
    if config.comm.visible == "own":
        devices = devices_of(world, config.cluster.gpus)
    if devices is not None:
        os.environ[VISIBLE] = devices
    kept = sorted(share) if bound else cores
    return Binding(os.uname().nodename, world.local_rank, threads, kept, bound, devices)


def share_of(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """Returns one rank's part of the cores, which are shared out evenly; none if they are too few.

    >>> share_of([0, 4, 1, 5, 2], 0, 2), share_of([0, 4, 1, 5, 2], 1, 2)
    ([0, 4, 1], [5, 2])
    """
    if local_size > len(cores):
        return []
    least, more = divmod(len(cores), local_size)
    first = local_rank * least + min(local_rank, more)
    return cores[first : first + least + (local_rank < more)]


def devices_of(
    world: World, count: int | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Returns the device that a rank sees: of those that its machine shows, in turn.

    Without CUDA_VISIBLE_DEVICES they are the first ``count``, or all.
    """
    there = visible_gpus(count, environ)
    return there[world.local_rank % len(there)] if there else environ.get(VISIBLE)


def _fact(core: int, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((_SYSTEM / f"cpu{core}" / "topology" / name).read_text(encoding="ascii"))
    return 0
