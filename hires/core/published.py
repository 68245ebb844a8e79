"""Numbers that the thesis on MPI4DL publishes, to stand beside ours."""

from __future__ import annotations

from typing import Any, NamedTuple

TABLE_2_1 = {
    "fp32": (12.48, 145.22),
    "fp16": (7.64, 224.85),
    "bf16": (5.28, 226.12),
    "int8": (2.39, 903.35),
}
"""GB and images per second of its "ResNet101" (``mpi4dl_resnet``) on one A100, inference of 256x256
images in batches of 64. The convolutions of its FP32 ran in TF32, torch's default."""
TABLE_2_1_RUN: dict[str, Any] = {
    "model": {"name": "mpi4dl_resnet", "n": 12, "classes": 10},
    "image": 256,
    "batch": 64,
    "task": {"name": "infer"},
}
"""Keys of a run of that network at that size."""

TABLE_2_2 = {
    "camelyon16": {"fp32": 70.27, "fp16": 70.26, "bf16": 70.32, "int8": 70.26},
    "imagenette": {"fp32": 75.87, "fp16": 75.87, "bf16": 75.9, "int8": 75.13},
    "imagenet": {"fp32": 77.62, "fp16": 77.57, "bf16": 78.41, "int8": 76.85},
    "cifar10": {"fp32": 86.02, "fp16": 86.05, "bf16": 86.04, "int8": 85.99},
}
"""Accuracy in per cent by data and precision. The value of ImageNet in BF16 is suspect: the
published script also casts the labels."""


MEAN, MOST, EACH = "the mean of all", "up to", "each"
"""How a number of the text stands for the bars of a figure: ``EACH`` is that of single ones."""


class PublishedNumber(NamedTuple):
    """A number that the text gives for a figure of chapter 2; its bars have none."""

    figure: str
    precision: str
    value: float
    what: str
    """``speed`` or ``memory``: a ratio, so that more is better; ``GB``: of all GPUs together."""
    how: str
    over: str = "fp32"
    """What the ratio is over: ``fp32`` with everything else alike, or ``one GPU``."""
    image: int | None = None
    """Of the bars that it is for; None: of any size."""
    tiles: int | None = None


FIGURES = (
    PublishedNumber("2.4", "fp16", 1.54, "speed", MEAN),
    PublishedNumber("2.4", "bf16", 1.45, "speed", MEAN),
    PublishedNumber("2.4", "int8", 6.5, "speed", MEAN),
    PublishedNumber("2.4", "int8", 6.72, "speed", EACH, image=1024),
    PublishedNumber("2.5", "fp16", 1.77, "memory", MEAN),
    PublishedNumber("2.5", "bf16", 1.47, "memory", MEAN),
    PublishedNumber("2.5", "int8", 4.55, "memory", MEAN),
    PublishedNumber("2.5", "int8", 6.29, "memory", EACH, image=1024),
    # One number for both figures.
    PublishedNumber("2.6", "fp16", 1.57, "memory", MEAN),
    PublishedNumber("2.6", "bf16", 1.40, "memory", MEAN),
    PublishedNumber("2.7", "fp16", 1.57, "memory", MEAN),
    PublishedNumber("2.7", "bf16", 1.40, "memory", MEAN),
    PublishedNumber("2.8", "fp16", 1.9, "speed", MOST),
    PublishedNumber("2.8", "bf16", 1.6, "speed", MOST),
    PublishedNumber("2.9", "fp16", 1.55, "speed", MOST),
    PublishedNumber("2.9", "bf16", 1.65, "speed", MOST),
    PublishedNumber("2.10", "fp32", 87.0, "GB", EACH, image=8192),
    PublishedNumber("2.11", "bf16", 1.8, "speed", EACH, over="one GPU", tiles=4),
    PublishedNumber("2.11", "bf16", 2.0, "speed", EACH, over="one GPU", tiles=8),
)
"""All of sections 2.5.2 and 2.5.3. The text prints 6.72 and 6.29 of 1024x1024 images without a
precision, in the paragraph that calls INT8 the best choice."""


def numbers_of(figure: str) -> list[PublishedNumber]:
    """Returns what the text gives for a figure; nothing if it gives no number."""
    return [one for one in FIGURES if one.figure == figure]
