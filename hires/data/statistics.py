"""Finds mean and deviation of the channels of a data set, as a network would see its images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import TaskConfig
from hires.data.opening import open_data

MOST_IMAGES = 4096
"""Images that are read; of more, as many at equal distances."""


def learnt_from(config: RunConfig) -> RunConfig:
    """Returns the config whose images a training of the same data learns from, as they are."""
    split = "train" if config.data.split in ("validation", "test") else config.data.split
    data = dataclasses.replace(config.data, split=split, normalize="white", mean=None, std=None)
    never = RunConfig().validate
    return dataclasses.replace(config, data=data, task=TaskConfig("infer"), validate=never)


def channel_statistics(
    config: RunConfig, on_read: Callable[[int, int], None] = lambda done, of: None
) -> tuple[list[float], list[float]]:
    """Returns means and deviations of the channels, of values from 0 (black) to 1 (white).

    They are of the pixels after ``data.fit``, and exact sums, so they depend on no order.
    ``on_read`` is called with the number of images that were read, of how many.
    """
    source = open_data(learnt_from(config))
    numbers = range(0, len(source), -(-len(source) // MOST_IMAGES))
    sums: list[list[list[float]]] = []
    for place, number in enumerate(numbers):
        pixels = source.window(number, (0, config.height), (0, config.width)).astype(np.float64)
        values = (pixels + 2) / 4
        sums.append([values.sum((1, 2)).tolist(), np.square(values).sum((1, 2)).tolist()])
        on_read(place + 1, len(numbers))
    count = len(sums) * config.height * config.width
    first, second = (
        [math.fsum(c) / count for c in zip(*p, strict=True)] for p in zip(*sums, strict=True)
    )
    deviations = [math.sqrt(max(s - m * m, 0.0)) for m, s in zip(first, second, strict=True)]
    # A channel without any difference says nothing, whatever it is divided by.
    return first, [d if d > 1e-6 else 1.0 for d in deviations]
