"""Looks for the compilers that ``engine.compile`` needs, without importing torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib import util
from pathlib import Path

TENSORRT = "tensorrt"
"""``engine.compile`` that builds engines of TensorRT."""
ENGINE_PACKAGES = ("torch_tensorrt", "tensorrt")


def missing(device: str, mode: str = "stage") -> str | None:
    """Returns what ``engine.compile`` lacks on this machine, and the remedy; None: nothing."""
    if mode == TENSORRT:
        if all(map(util.find_spec, ENGINE_PACKAGES)):
            return None
        return "Torch-TensorRT is not installed; pip install 'hires[tensorrt]'"
    if device == "cuda":
        if util.find_spec("triton") is None:
            return "Triton is not installed; install the triton that belongs to torch"
        name, variable, found = "C", "CC", os.environ.get("CC") or "gcc"
        # Triton takes CC, whatever it names; without it one of these.
        candidates = [found] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    else:
        name, variable, found = "C++", "CXX", os.environ.get("CXX") or "g++"
        candidates = [found]
    if not any(map(shutil.which, candidates)):
        return f"there is no {name} compiler ({found}); install g++, or set {variable}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python.h is missing; install the headers of this Python, as python3-dev"
    return None
