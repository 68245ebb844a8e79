"""Finds what this machine offers to a rank: NVIDIA GPUs, the installed torch, compilers.

Nothing here imports torch, which takes seconds: the front end needs this before anything starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hires.core.shipped import adding

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
