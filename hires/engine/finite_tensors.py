"""Refuses tensors of an inference that are not finite, or that a quantised file cannot hold.

Kernels that activate hide them: oneDNN's ReLU of NaN is 0, and so is the 8-bit integer that a
scale of infinity leaves. A damaged network would then be evaluated like a healthy one, so the
tensors are looked at when they are read or made, and the kernels need not look at all.

    own tensor of weights=FILE  --looked at-->  recipe -->  tensor of a kernel  --looked at-->

A training is checked where it begins with ``weights``: later its loss shows such a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of
from hires.quant.affine import FACTOR_LIMIT
from hires.quant.emptied_weights import is_emptied

_QUANTISE = "the file is damaged: make it again with `hires quantize`"
_VARIANCE = "running_var"
_STATISTICS = ("running_mean", _VARIANCE)


def require_finite(
    config: RunConfig, graph: Graph, tensors: Mapping[str, Tensor], begins: bool = False
) -> None:
    """Raises RunError for NaN, infinity and negative variances among tensors of an inference.

    Those of a training only where it ``begins``, and what its precision cannot hold.
    A tensor of the network's own code that no layer multiplies by may hold infinity, as a mask.
    """
    if config.task.name == "train" and not begins:
        return
    low_type = config.autocast_type or config.image_type
    most = torch.finfo(getattr(torch, low_type)).max
    source = _source(config)
    multiplied = {
        name for node in graph.nodes if facts_of(node.kind).multiplies for name in node.params
    }
    parts = {
        node.args[part]["param"]: (part, node.args.get("largest", 0))
        for node in graph.nodes
        if facts_of(node.kind).quantized
        for part in ("weight", "multiplier", "offset")
        if isinstance(node.args.get(part), dict) and "param" in node.args[part]
    }

    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, FakeTensor) or tensor.is_meta or is_emptied(tensor):
            continue
        fact, end = graph.params.get(name), name.rpartition(".")[2]
        recipe = (fact.recipe if fact else None) or {}
        low, high = _ends(tensor)
        wrong = ""
        is_mask = not (
            name in multiplied
            or (fact is not None and fact.trainable)
            or end in _STATISTICS
            or recipe.get("make", "computed") != "computed"
        )
        if isnan(low) or not (is_mask or (isfinite(low) and isfinite(high))):
            wrong = "is not finite"
        elif name in multiplied and max(-low, high) > most:
            wrong = f"overflows {low_type}, in which the network multiplies"
        elif end == _VARIANCE and low < 0:
            wrong = "is a variance, which is never negative"
        elif name in parts and recipe.get("make") is None:
            wrong = _unusable(*parts[name], low, high)
        if wrong:
            made = f", made of {' and '.join(recipe['params'])}," if recipe else ""
            remedy = _QUANTISE if name in parts and not recipe else _remedy(tensor)
            raise RunError(f"{name}{made} of {source} {wrong}: {_where(tensor)}; {remedy}")


def _unusable(part: str, largest: int, low: float, high: float) -> str:
    # A tensor of a quantised layer that a file holds.
    if part == "weight":
        end = low if low < -largest else high
        return f"holds {end:g}, outside of -{largest} to {largest}" if abs(end) > largest else ""
    wide = high >= FACTOR_LIMIT or low <= -FACTOR_LIMIT
    if part == "multiplier":
        wide = wide or low < 0
    return f"is no {part} of a quantised layer" if wide else ""


def _source(config: RunConfig) -> str:
    begin = config.checkpoint.source
    if config.weights is None and begin is not None:
        return f"checkpoint.resume={begin}"
    if config.weights is None:
        return f"model={config.model.name}"
    return f"weights={config.weights}"


def _ends(tensor: Tensor) -> tuple[float, float]:
    # In one pass and without memory; both are NaN if any number is.
    numbers = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.int8
    if not tensor.numel() or not numbers:
        return 0.0, 0.0
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = torch.aminmax(real.detach())
    return float(low), float(high)


def _where(tensor: Tensor) -> str:
    """Returns the first number that cannot be used, with its place, and how many there are."""
    real = tensor.detach().double() if not tensor.is_complex() else tensor.detach().abs()
    wrong = real.isnan()
    wrong = wrong if wrong.any() else ~real.isfinite()
    if not wrong.any():  # then the farthest one is the fault
        low = real.min()
        wrong = real == (low if low < 0 else real.max())
    place = wrong.nonzero()[0].tolist()
    return f"{real[tuple(place)].item():g} at {place}, {int(wrong.sum())} of {wrong.numel()} such"


def _remedy(tensor: Tensor) -> str:
    if tensor.dtype == torch.float16:
        return "fp16 holds no number above 65504: use precision=bf16 or fp32, or other weights"
    return (
        f"a training that diverged, a damaged file, or numbers beyond "
        f"{str(tensor.dtype).removeprefix('torch.')} leave such: name another file or an earlier "
        f"checkpoint, or make the file again"
    )
