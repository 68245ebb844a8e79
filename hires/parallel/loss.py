r"""Computes the loss of one microbatch from an output that is whole, in tiles or in shards.

A loss is a function of a few sums over the output (:mod:`hires.core.losses`). For the mean of
terms these are their sum and their number, with class weights the sum of the weights of the labels;
for Dice the overlap and the size of each class. Where no label counts, the loss is 0 and has no
gradient. Ranks that hold parts of the output bring their sums together:

    tile 0   its sums   \
                         + one sum of ranks = sums over the whole output -> loss on all of them
    tile 1   its sums   /

The gradient is that of the own part: what other tiles add is a constant here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from hires.core.config.training_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import LOSSES, loss_named
from hires.nets.random_draws import Draws
from hires.parallel.context import Context
from hires.plan.rules import WHOLE

_LOSS_DRAW = 2**31
"""Number of the first draw of a loss: above those of every network."""


def plain_loss(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss of a whole output.

    ``output`` is (n, C) or (n, C, H, W), the target classes, (n) or (n, H, W), or images of the
    output's shape. ``keys`` name the loss, not ``auto``.
    """
    return loss_named(keys).mean(_wide(output), target)


def evaluation_loss(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    """Returns :func:`plain_loss`; one that draws has the same numbers in each call."""
    with loss_draws(keys, 0, 0, 0, len(output)):
        return plain_loss(keys, output, target)


def sample_losses(
    keys: LossConfig, output: Tensor, target: Tensor, ignored: int | None = None
) -> Tensor:
    """Returns the loss of each sample alone, (n,); every class counts, and alike.

    ``ignored``: the value of pixels of label maps that have no label.
    """
    alone = dataclasses.replace(keys, weights=None, ignore_index=ignored)
    pairs = zip(torch.split(output, 1), torch.split(target, 1), strict=True)
    each = [evaluation_loss(alone, *pair) for pair in pairs]
    return torch.stack(each)


def loss_of(
    keys: LossConfig, output: Tensor, target: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of one microbatch, on every rank of the stage, and whether a label counts.

    None: each does. Where the output lies in tiles or shards, the target is the same part of the
    whole target.
    """
    output = _wide(output)
    graph, loss, divides = context.plan.graph, loss_named(keys), divides_output(context)
    draws = loss_draws(keys, context.seed, context.step, context.first_sample, graph.input_shape[0])
    with _NoDraws(0, 0, 0, 1) if divides and loss.draws else draws:
        if not (divides or keys.ignored):
            return loss.mean(output, target), None
        sums = loss.sums(output, target)
    if divides:
        total = sums.detach().clone()
        context.cursor.add_up(total, graph.output)
        sums = sums + (total - sums.detach())
    counts = sums.detach()[sums.numel() // 2 :].sum() > 0 if keys.ignored else None
    return loss.value(sums), counts


def loss_draws(
    keys: LossConfig, seed: int, step: int, first_sample: int, samples: int
) -> contextlib.AbstractContextManager[Any]:
    """Returns the mode under which a loss draws: numbers that no layer draws."""
    if not LOSSES[keys.name].draws:
        return contextlib.nullcontext()
    return Draws(seed, step, first_sample, samples, _LOSS_DRAW)


class _NoDraws(Draws):  # type: ignore[no-untyped-call]
    """Refuses what a loss draws of a part of the output, whose place in it a draw does not know."""

    def numbers(self, *_: Any, **__: Any) -> Any:
        """Raises ConfigError."""
        raise ConfigError(
            "loss.target draws random numbers, which for a part of the output would not be those "
            "of one process; use a layout whose last stage is one rank, as parallel=sp+lp"
        )

    _seeded = numbers


def divides_output(context: Context) -> bool:
    """Whether the ranks of a stage, the last one, hold parts of the output."""
    layout = context.stage.layout[context.plan.graph.output]
    return layout != WHOLE and context.stage.num_ranks > 1


def _wide(output: Tensor) -> Tensor:
    return output if output.dtype == torch.float64 else output.float()
