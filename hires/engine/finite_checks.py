"""Ends what computes with numbers that are not finite: with which tensor or images, and why.

Kernels that activate hide NaN and infinity: oneDNN's ReLU of NaN is 0, and so is the 8-bit integer
that a scale of infinity leaves. A damaged network would then be evaluated like a healthy one, so
tensors are looked at when they are read or made:

    own tensor of weights=FILE  --looked at-->  recipe -->  tensor of a kernel  --looked at-->

A training is checked where it begins with ``weights``; later its loss, or the norm of its
gradients, shows what is broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import isfinite, isnan

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.core.config.run_config import RunConfig
from hires.core.errors import LossError, RunError
from hires.core.units import listed
from hires.parallel.context import Context
from hires.parallel.executor import StepResult
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of
from hires.quant.int8_kernels import is_emptied

_VARIANCE = "running_var"
_NAMED = 4
"""Images that an error names."""


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
    multiplied = {
        name for node in graph.nodes if facts_of(node.kind).multiplies for name in node.params
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
            or end in ("running_mean", _VARIANCE)
            or recipe.get("make", "computed") != "computed"
        )
        if isnan(low) or not (is_mask or (isfinite(low) and isfinite(high))):
            wrong = "is not finite"
        elif name in multiplied and max(-low, high) > most:
            wrong = f"overflows {low_type}, in which the network multiplies"
        elif end == _VARIANCE and low < 0:
            wrong = "is a variance, which is never negative"
        if wrong:
            made = f", made of {' and '.join(recipe['params'])}," if recipe else ""
            text = f"{name}{made} of {_source(config)} {wrong}: {_where(tensor)}"
            raise RunError(f"{text}; {_remedy(tensor)}")


def _source(config: RunConfig) -> str:
    if config.weights is not None:
        return f"weights={config.weights}"
    begin = config.checkpoint.source
    return f"model={config.model.name}" if begin is None else f"checkpoint.resume={begin}"


def _ends(tensor: Tensor) -> tuple[float, float]:
    # In one pass and without memory; both are NaN if any number is.
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0, 0.0
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = torch.aminmax(real.detach())
    return float(low), float(high)


def _where(tensor: Tensor) -> str:
    # The first number that cannot be used, with its place, and how many there are.
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


class FiniteLoss:
    """Looks at the loss of each step of an attempt, on one rank."""

    def __init__(
        self, config: RunConfig, context: Context, samples: Callable[[int], list[str]]
    ) -> None:
        """``samples`` returns the names of those of this rank's replica in a step."""
        self._config, self._context, self._samples = config, context, samples
        self._steps = 0

    def require(self, step: int, result: StepResult, loss: float | None = None) -> None:
        """Raises a LossError if the loss of a step, or the norm of its gradients, is not finite.

        ``loss`` is that of all replicas, if it is known.
        """
        loss, norm = result.loss if loss is None else loss, result.grad_norm
        if loss is not None and not isfinite(loss):
            broken = [m for m, one in result.losses.items() if not isfinite(float(one))]
            what = f"the loss is {loss}"
        elif norm is not None and not isfinite(norm):
            what, broken = f"the norm of all gradients is {norm}", [*result.losses]
        else:
            self._steps += 1
            return
        names = ""
        if broken:
            size, every = self._context.plan.graph.input_shape[0], self._samples(step)
            own = (every[m * size : (m + 1) * size] for m in broken)
            unique = [*dict.fromkeys(itertools.chain(*own))]
            names = f", of the images {listed(unique, _NAMED)}"
        raise LossError(f"{what} at step {step}{names}; {self._cause()}")

    def _cause(self) -> str:
        # Images and labels that are read are finite: left are the weights, and what divides by 0.
        config = self._config
        loss = f", or loss.target={config.loss.target}," if config.loss.name == "custom" else ""
        divides = f"the network{loss} makes too large values of these images, or divides by 0"
        if self._steps:
            return (
                f"the steps before may have made the weights too large: a smaller optimizer.lr "
                f"(now {config.optimizer.lr}) helps, or optimizer.clip_norm; or {divides}"
            )
        if origin := config.weights or config.checkpoint.source:
            divides = f"the weights of {origin} are not finite or too large, or {divides}"
        return f"no step has moved the weights yet, so optimizer.lr is not the cause: {divides}"
