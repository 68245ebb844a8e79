"""Computes the loss of one microbatch from an output that is whole, in tiles or in shards.

A loss is a function of a few sums over the output. For the mean of terms these are their sum and
their number, with class weights the sum of the weights of the labels; for Dice the overlap and the
size of each class. Where no label counts, the loss is 0 and has no gradient. Ranks that hold parts
of the output bring their sums together:

    tile 0   its sums   \
                         + one sum of ranks = sums over the whole output -> loss on all of them
    tile 1   its sums   /

The gradient is that of the own part: what other tiles add is a constant here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.config.training_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES
from hires.nets.custom import imported
from hires.nets.random_draws import Draws
from hires.parallel.context import Context
from hires.plan.rules import WHOLE

_NO_LABEL = -100
"""What torch ignores if nothing is to be ignored: no label."""
_LOSS_DRAW = 2**31
"""Number of the first draw of a custom loss: above those of every network."""


def plain_loss(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss of a whole output, as plain torch computes it.

    ``output`` is (n, C) or (n, C, H, W), the target classes, (n) or (n, H, W), or images of the
    output's shape. ``keys`` name the loss, not ``auto``.
    """
    if keys.compares == CLASSES:
        target = _labels(output, target)
    if keys.name == "custom":
        return _own_mean(keys, output, target)
    if keys.name == "cross_entropy" and not keys.ignored:
        return F.cross_entropy(class_scores(output), target, label_smoothing=keys.label_smoothing)
    if keys.name in ("l1", "l2"):
        return (F.l1_loss if keys.name == "l1" else F.mse_loss)(output, target)
    return loss_of_sums(keys, sums_of_part(keys, output, target))


def evaluation_loss(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    """Returns :func:`plain_loss`; a custom loss draws the same numbers in each call."""
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
    if output.dtype != torch.float64:
        output = output.float()
    samples = context.plan.graph.input_shape[0]
    with loss_draws(keys, context.seed, context.step, context.first_sample, samples):
        return _loss_of(keys, output, target, context)


def loss_draws(
    keys: LossConfig, seed: int, step: int, first_sample: int, samples: int
) -> contextlib.AbstractContextManager[Any]:
    """Returns the mode under which a custom loss draws: numbers that no layer draws."""
    if keys.name != "custom":
        return contextlib.nullcontext()
    return Draws(seed, step, first_sample, samples, _LOSS_DRAW)


def _loss_of(
    keys: LossConfig, output: Tensor, target: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    graph = context.plan.graph
    divides = divides_output(context)
    if not (divides or keys.ignored):
        return plain_loss(keys, output, target), None
    sums = sums_of_part(keys, output, target)
    if divides:
        total = sums.detach().clone()
        context.cursor.add_up(total, graph.output)
        sums = sums + (total - sums.detach())
    # The sizes of all classes are twice the number of labels, those of a mean their weight.
    counts = sums.detach()[sums.numel() // 2 :].sum() > 0 if keys.ignored else None
    return loss_of_sums(keys, sums), counts


def class_scores(output: Tensor) -> Tensor:
    """Returns an output with a score for each class, (n, C, ...), two at least.

    A single score is that of the second of two classes, whose first one has the score 0: so the
    softmax of both is the sigmoid of the one.
    """
    return F.pad(output, [0, 0] * (output.dim() - 2) + [1, 0]) if output.shape[1] == 1 else output


def divides_output(context: Context) -> bool:
    """Whether the ranks of a stage, the last one, hold parts of the output."""
    layout = context.stage.layout[context.plan.graph.output]
    return layout != WHOLE and context.stage.num_ranks > 1


def require_loss(keys: LossConfig, divides: bool) -> None:
    """Raises ConfigError if a loss cannot be computed; ``divides``: of an output in parts."""
    if keys.name != "custom":
        return
    function = imported(str(keys.target), "loss.target")
    if divides and not _reduces(function):
        raise ConfigError(
            f"loss.target={keys.target} has no argument reduction, by which ranks that hold parts "
            f'of the output get their own terms; add reduction="mean", and return all terms for '
            f'reduction="none", or use a layout whose last stage is one rank, as parallel=sp+lp'
        )


def sums_of_part(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    """Returns the sums of a part of the output, as many as ``num_sums`` of its loss."""
    if keys.name == "custom":
        terms = imported(str(keys.target), "loss.target")(
            output, _labels(output, target) if keys.compares == CLASSES else target,
            reduction="none",
        )  # fmt: skip
        return _with_count(terms.sum(), terms.numel())
    if keys.compares != CLASSES:
        function: Any = F.l1_loss if keys.name == "l1" else F.mse_loss
        return _with_count(function(output, target, reduction="sum"), output.numel())
    labels = _labels(output, target)
    counted = torch.ones_like(labels, dtype=torch.bool)
    if keys.ignore_index is not None:
        counted = labels != keys.ignore_index
    if keys.name == "cross_entropy":
        return _cross_entropy_sums(keys, output, labels, counted)
    mask, hot = counted.unsqueeze(1).to(output), _one_hot(labels, output)
    if keys.name == "bce":
        terms = F.binary_cross_entropy_with_logits(output, hot, reduction="none")
        return torch.stack(((terms * mask).sum(), mask.sum() * output.shape[1]))
    likely = output.softmax(1) if output.shape[1] > 1 else output.sigmoid()
    over = [0, *range(2, output.dim())]  # all dims but that of the classes
    overlap, size = likely * hot * mask, (likely + hot) * mask
    return torch.cat((overlap.sum(over), size.sum(over)))


def loss_of_sums(keys: LossConfig, sums: Tensor) -> Tensor:
    """Returns the loss, a number, that follows from the sums over the whole output."""
    if keys.name != "dice":
        loss, is_empty = _quotient(sums[0], sums[1])
        return loss.masked_fill(is_empty, 0)
    overlap, size = sums.view(2, -1)
    share, is_empty = _quotient(2 * overlap + keys.smooth, size + keys.smooth)
    one: Tensor = 1 - share.masked_fill(is_empty, 1).mean()
    return one


def _quotient(above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    # And where it is one of nothing; a gradient of 0 / 0 would be NaN there, whatever is filled in.
    is_empty = below.detach() == 0
    return above / below.masked_fill(is_empty, 1), is_empty


def _cross_entropy_sums(
    keys: LossConfig, output: Tensor, labels: Tensor, counted: Tensor
) -> Tensor:
    output = class_scores(output)
    weight = None if keys.weights is None else output.new_tensor(keys.weights)
    ignored = _NO_LABEL if keys.ignore_index is None else keys.ignore_index
    total = F.cross_entropy(
        output, labels, weight, ignore_index=ignored, reduction="sum",
        label_smoothing=keys.label_smoothing,
    )  # fmt: skip
    if weight is None:
        return torch.stack((total, counted.sum().to(total)))
    return torch.stack((total, (weight[labels.where(counted, 0)] * counted).sum()))


def _labels(output: Tensor, target: Tensor) -> Tensor:
    # The class of an image is that of each of its pixels.
    if target.dim() == 1 and output.dim() > 2:
        ones = (1,) * (output.dim() - 2)
        return target.view(-1, *ones).expand(-1, *output.shape[2:])
    return target


def _one_hot(labels: Tensor, output: Tensor) -> Tensor:
    # (n, C, ...); of one channel, which is the score of class 1, the label itself.
    if output.shape[1] == 1:
        return (labels == 1).unsqueeze(1).to(output)
    classes = torch.arange(output.shape[1], device=labels.device)
    return (labels.unsqueeze(1) == classes.view(-1, *(1,) * (labels.dim() - 1))).to(output)


def _with_count(total: Tensor, count: int) -> Tensor:
    return torch.stack((total, total.new_tensor(float(count))))


def _reduces(function: Callable[..., Any]) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except ValueError:  # a function of C has no signature
        return False


def _own_mean(keys: LossConfig, output: Tensor, target: Tensor) -> Tensor:
    made = imported(str(keys.target), "loss.target")(output, target)
    if not isinstance(made, Tensor) or made.dim():
        what = f"a tensor {[*made.shape]}" if isinstance(made, Tensor) else type(made).__name__
        raise ConfigError(
            f"loss.target={keys.target} returns {what}; return a tensor of one number"
        )
    return made
