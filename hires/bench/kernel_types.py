"""Counts the convolutions and products that a step ran, by the type of numbers that they read.

oneDNN lists every primitive that it executes (its verbose mode, Intel oneDNN developer guide), for
hires and torch alike; it prints from C, so the file descriptor itself is redirected.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping

import torch

from hires.core.precisions import INT8

TYPES = {"fp32": {"f32"}, "bf16": {"bf16"}, INT8: {"u8", "s8"}}
"""oneDNN's names of the types that the kernels of a precision read."""
_EXECUTED = re.compile(
    r"^onednn_verbose,(?:v1,)?primitive,exec,cpu,(?:convolution|deconvolution|inner_product|matmul)"
    r",[^,]+,[^,]*,.*?src[^:]*:(\w+):",
    re.MULTILINE,
)


def onednn_kernels(step: Callable[[], object]) -> dict[str, int]:
    """Runs a step; returns how many convolutions and products oneDNN executed, by type."""
    sys.stdout.flush()
    kept, level = os.dup(1), torch.backends.mkldnn.VERBOSE_ON
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(level):  # type: ignore[no-untyped-call]
                step()
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has printed and still holds
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return count_kernels(file.read().decode(errors="replace"))


def count_kernels(text: str) -> dict[str, int]:
    """Returns how many heavy primitives oneDNN's verbose output lists, by type."""
    return dict(collections.Counter(_EXECUTED.findall(text)))


def ran_as(precision: str, kernels: Mapping[str, int]) -> bool:
    """Returns whether all kernels read a type of this precision, and there are some."""
    return bool(kernels) and kernels.keys() <= TYPES[precision]
