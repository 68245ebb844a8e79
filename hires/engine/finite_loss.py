"""Ends a training whose loss, or norm of gradients, is not finite: of which images, and why.

Images and labels that are read are finite, and a microbatch without labels has the loss 0. What is
left are weights that steps have made too large, weights that the run began with, and a network or
loss that divides by 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from hires.core.config.run_config import RunConfig
from hires.core.errors import LossError
from hires.core.units import listed
from hires.parallel.context import Context
from hires.parallel.executor import StepResult

_NAMED = 4
"""Images that an error names."""


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
        broken = [m for m, one in result.losses.items() if not math.isfinite(float(one))]
        what = ""
        if loss is not None and not math.isfinite(loss):
            what = f"the loss is {loss}"
        elif norm is not None and not math.isfinite(norm):
            what, broken = f"the norm of all gradients is {norm}", [*result.losses]
        if what:
            names = self._names(step, broken)
            raise LossError(f"{what} at step {step}{names}; {self._cause()}")
        self._steps += 1

    def _names(self, step: int, microbatches: list[int]) -> str:
        if not microbatches:
            return ""
        size, every = self._context.plan.graph.input_shape[0], self._samples(step)
        own = (every[m * size : (m + 1) * size] for m in microbatches)
        names = [*dict.fromkeys(itertools.chain(*own))]
        return f", of the images {listed(names, _NAMED)}"

    def _cause(self) -> str:
        config, maker = self._config, "the network"
        if config.loss.name == "custom":
            maker += f", or loss.target={config.loss.target},"
        divides = f"{maker} makes values of these images that are too large, or divides by 0"
        if not self._steps:
            origin = config.weights or config.checkpoint.source
            if origin is not None:
                divides = f"the weights of {origin} are not finite or too large, or {divides}"
            return f"no step has moved the weights yet, so optimizer.lr is not the cause: {divides}"
        lr, clips = config.optimizer.lr, config.optimizer.clip_norm is not None
        helps = f"a smaller optimizer.lr (now {lr}) helps"
        helps += "" if clips else ", or optimizer.clip_norm=1"
        return f"the steps before may have made the weights too large: {helps}; or {divides}"
