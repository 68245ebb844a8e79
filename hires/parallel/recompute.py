"""Computes part of a stage again in the backward pass instead of keeping its values.

A segment keeps its inputs. When its gradient comes it runs once more, with the same halos and
statistics in the same order on all tiles, and autograd goes back through that run.

Source:
    Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context

Run = Callable[[dict[str, Any]], dict[str, Tensor]]
"""Computes a segment's outputs from its inputs."""


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a stage that are computed again together."""

    context: Context
    run: Run
    inputs: list[str]
    """Values that it reads and does not make."""
    outputs: list[str]
    """Values that it makes and that are read behind it."""
    random: bool
    """Whether it draws random numbers, which must be the same again."""


def run_segment(segment: Segment, values: dict[str, Any]) -> dict[str, Tensor]:
    """Returns a segment's outputs, keeping nothing else for the backward pass."""
    tensors = [values[name] for name in segment.inputs]
    if not torch.is_grad_enabled():
        return segment.run(dict(zip(segment.inputs, tensors, strict=True)))
    # Parameters are no inputs of the Function: this makes autograd come back even if no input asks.
    anchor = torch.empty(0, requires_grad=True)
    outputs = Recomputed.apply(anchor, segment, *tensors)  # type: ignore[no-untyped-call]
    return dict(zip(segment.outputs, outputs, strict=True))


class Recomputed(torch.autograd.Function):
    """Inputs of a segment -> its outputs, the segment computed again on the way back."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, segment: Segment, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the outputs."""
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.random = torch.get_rng_state() if segment.random else None
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        outputs = segment.run(dict(zip(segment.inputs, tensors, strict=True)))
        return tuple(outputs[name] for name in segment.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs the segment again and goes back through it; parameters get their gradients."""
        segment: Segment = ctx.segment
        leaves = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        enabled, dtype = ctx.autocast
        with _again(segment.context, ctx.random), torch.enable_grad():
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                outputs = segment.run(dict(zip(segment.inputs, leaves, strict=True)))
            made = [
                (outputs[name], grad)
                for name, grad in zip(segment.outputs, grads, strict=True)
                if grad is not None and outputs[name].requires_grad
            ]
            torch.autograd.backward([tensor for tensor, _ in made], [grad for _, grad in made])
        return None, None, *(leaf.grad for leaf in leaves)


@contextlib.contextmanager
def _again(context: Context, random: Tensor | None) -> Iterator[None]:
    """Marks what runs as a repetition, and gives it the first run's random numbers."""
    context.recomputing = True
    now = torch.get_rng_state() if random is not None else None
    if random is not None:
        torch.set_rng_state(random)
    try:
        yield
    finally:
        context.recomputing = False
        if now is not None:
            torch.set_rng_state(now)
