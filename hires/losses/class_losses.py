"""Losses that compare scores, (n, C, ...), with classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hires.core.losses import LABELS, LOSSES, Loss, quotient

if TYPE_CHECKING:
    from torch import Tensor

_NO_LABEL = -100
"""What torch ignores if nothing is to be ignored: no label."""


def class_scores(output: Tensor) -> Tensor:
    """Returns an output with a score for each class, (n, C, ...), two at least.

    A single score is that of the second of two classes, whose first one has the score 0: so the
    softmax of both is the sigmoid of the one.
    """
    import torch.nn.functional as F

    return F.pad(output, [0, 0] * (output.dim() - 2) + [1, 0]) if output.shape[1] == 1 else output


def labels_of(output: Tensor, target: Tensor) -> Tensor:
    """Returns a class for each score: that of an image is that of each of its pixels."""
    if target.dim() == 1 and output.dim() > 2:
        ones = (1,) * (output.dim() - 2)
        return target.view(-1, *ones).expand(-1, *output.shape[2:])
    return target


class Labelled(NamedTuple):
    """The labels of an output."""

    labels: Tensor
    counted: Tensor
    """Whether each counts."""
    hot: Tensor
    """1 for the class of each, (n, C, ...); of one channel, which is the score of class 1, whether
    it is that."""


class ClassLoss(Loss):
    """A loss of classes, some of which may be ignored."""

    ignores = True

    def labelled(self, output: Tensor, target: Tensor) -> Labelled:
        """Returns the labels of an output."""
        import torch

        labels, ignored = labels_of(output, target), self.keys.ignore_index
        counted = (
            torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
        )
        if output.shape[1] == 1:
            return Labelled(labels, counted, (labels == 1).unsqueeze(1).to(output))
        classes = torch.arange(output.shape[1], device=labels.device)
        hot = labels.unsqueeze(1) == classes.view(-1, *(1,) * (labels.dim() - 1))
        return Labelled(labels, counted, hot.to(output))


@LOSSES.register("cross_entropy")
class CrossEntropy(ClassLoss):
    """The mean over labels, weighted by their classes."""

    summary = "Cross-entropy of classes, of images or of pixels"

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the terms, and the weight of the labels."""
        import torch
        import torch.nn.functional as F

        keys, scores, labels = self.keys, class_scores(output), labels_of(output, target)
        weight = None if keys.weights is None else output.new_tensor(keys.weights)
        ignored = _NO_LABEL if keys.ignore_index is None else keys.ignore_index
        total = F.cross_entropy(
            scores, labels, weight, ignore_index=ignored, reduction="sum",
            label_smoothing=keys.label_smoothing,
        )  # fmt: skip
        counted = labels != ignored
        if weight is None:
            return torch.stack((total, counted.sum().to(total)))
        return torch.stack((total, (weight[labels.where(counted, 0)] * counted).sum()))


@LOSSES.register("bce")
class BinaryCrossEntropy(ClassLoss):
    """The mean over labels and classes."""

    summary = "Binary cross-entropy of each class by itself, with logits: also of many labels"
    also = LABELS

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the terms, and their number."""
        import torch
        import torch.nn.functional as F

        if self.keys.compares == LABELS:
            hot, mask = target.to(output), torch.ones_like(output[:, :1])
        else:
            _, counted, hot = self.labelled(output, target)
            mask = counted.unsqueeze(1).to(output)
        weight = None
        if self.keys.weights is not None:
            ones = (1,) * (output.dim() - 2)
            weight = output.new_tensor(self.keys.weights).view(-1, *ones)
        terms = F.binary_cross_entropy_with_logits(output, hot, pos_weight=weight, reduction="none")
        return torch.stack(((terms * mask).sum(), mask.sum() * output.shape[1]))


@LOSSES.register("dice")
class Dice(ClassLoss):
    """One minus the mean of the coefficients of the classes."""

    summary = "One minus the mean Dice coefficient of the classes, for segmentation"

    @classmethod
    def num_sums(cls, channels: int) -> int:
        """Returns two for each class."""
        return 2 * channels

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the overlaps and the sizes of all classes."""
        import torch

        _, counted, hot = self.labelled(output, target)
        likely = output.softmax(1) if output.shape[1] > 1 else output.sigmoid()
        over, mask = [0, *range(2, output.dim())], counted.unsqueeze(1).to(output)
        overlap, size = likely * hot * mask, (likely + hot) * mask
        return torch.cat((overlap.sum(over), size.sum(over)))

    def value(self, sums: Tensor) -> Tensor:
        """Returns the loss; a class without pixels is all right."""
        overlap, size = sums.view(2, -1)
        smooth = self.keys.smooth
        one: Tensor = 1 - quotient(2 * overlap + smooth, size + smooth, where_empty=1.0).mean()
        return one
