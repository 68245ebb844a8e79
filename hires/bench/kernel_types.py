"""Counts the convolutions and products that a step ran, by the type of numbers that they read.

oneDNN lists every primitive that it executes (its verbose mode, Intel oneDNN developer guide), for
hires and torch alike; it prints from C, so the file descriptor itself is redirected. ONNX Runtime
and OpenVINO have listings of their own. All types carry oneDNN's names.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hires.core.precisions import INT8

TYPES = {"fp32": {"f32"}, "bf16": {"bf16"}, INT8: {"u8", "s8"}}
"""oneDNN's names of the types that the kernels of a precision read."""
FLOAT_FALLBACK = "f32 ConvTranspose"
"""Kernels that a quantised network has in float: ONNX Runtime has no int8 kernel for them."""
_EXECUTED = re.compile(
    r"onednn_verbose,(?:v1,)?primitive,exec,cpu,(?:convolution|deconvolution|inner_product|matmul)"
    r",[^,]+,[^,]*,.*?src[^:]*:(\w+):"
)
_HEAVY = re.compile(r"Conv|Deconv|Gemm|MatMul|FullyConnected")
_NAMES = {
    "float": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "u8",
    "int8": "s8",
    "i8": "s8",
}
"""A library's name of a type -> oneDNN's, where they differ."""


def onednn_kernels(step: Callable[[], object]) -> dict[str, int]:
    """Runs a step; returns how many convolutions and products oneDNN executed, by type."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            level = torch.backends.mkldnn.VERBOSE_ON
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
    matches = [_EXECUTED.match(line) for line in text.splitlines()]
    return dict(collections.Counter(match[1] for match in matches if match))


def count_profile(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many convolutions and products a profile of ONNX Runtime lists, by type.

    Transposed convolutions are counted apart, as :data:`FLOAT_FALLBACK` names them.
    """
    counts = collections.Counter[str]()
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        operator, shapes = event["args"]["op_name"], event["args"]["input_type_shape"]
        if _HEAVY.search(operator):
            read = next(iter(shapes[0]))
            kind = _NAMES.get(read, read)
            counts[f"{kind} {operator}" if operator == "ConvTranspose" else kind] += 1
    return dict(counts)


def count_graph(nodes: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Returns how many convolutions and products OpenVINO's model at run time has, by type.

    ``nodes`` are their ``rt_info``. A node of 8 bits whose kernel (``primitiveType``) is not of 8
    bits counts by that kernel: it converts what it reads.
    """
    kinds = []
    for node in nodes:
        if _HEAVY.search(node["layerType"]):
            reads, kernel = node["runtimePrecision"], node["primitiveType"].rpartition("_")[2]
            narrow = reads in ("u8", "i8") and kernel.lower() not in ("i8", "u8")
            kinds.append(kernel.lower() if narrow else reads)
    return dict(collections.Counter(_NAMES.get(kind, kind) for kind in kinds))


def ran_as(precision: str, kernels: Mapping[str, int]) -> bool:
    """Returns whether all kernels read a type of this precision, and there are some."""
    left = {FLOAT_FALLBACK} if precision == INT8 else set()
    types = {kind.partition(" ")[0] for kind in kernels.keys() - left}
    return bool(types) and types <= TYPES[precision]
