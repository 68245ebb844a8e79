"""Chooses the images of each step of a run, which every rank, layout and machine chooses alike.

epoch 0          epoch 1          epoch 2           each a permutation of the data set
[ 3 0 4 1 2 ]    [ 1 4 0 2 3 ]    [ 2 ...           (in order without ``shuffle``)
 step 0  | step 1   | step 2   |                    batch = 3

``data.balance``: an epoch has as many images of each class, and all of a class come before one
comes again:

classes          a a a a a a b b c          9 images: 3 of each class an epoch
epoch 0, 1       a a a b b b c c c          a: three of its six, then the other three
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.source import Source

_STREAM = 0x62616C
"""Sets these numbers apart from those that are drawn of the same seed elsewhere."""
Epoch = Callable[[int], Sequence[int]]
"""Returns the images of an epoch, in the order in which they come."""


def step_images(config: RunConfig, source: Source, step: int) -> list[int]:
    """Returns the images of one step of a run, for the whole world.

    Replicas and microbatches take them in their order. ConfigError: they have no classes.
    """
    order = balanced if config.balances else ordered
    epoch = order(source, config.seed, config.shuffles)
    return step_indices(step, config.batch, len(source), epoch)


def step_indices(step: int, batch: int, length: int, epoch: Epoch) -> list[int]:
    """Returns the images of one step, which counts from 0; a batch may exceed the data set."""
    indices: list[int] = []
    position, end = step * batch, (step + 1) * batch
    while position < end:
        number, first = divmod(position, length)
        count = min(length - first, end - position)
        indices += epoch(number)[first : first + count]
        position += count
    return indices


@lru_cache(maxsize=4)
def ordered(source: Source, seed: int, shuffle: bool) -> Epoch:
    """Returns the function from an epoch to a permutation of all images."""

    @lru_cache(maxsize=2)  # a step touches the end of one epoch and the start of the next
    def epoch(number: int) -> Sequence[int]:
        return _permutation(len(source), [seed, number]) if shuffle else range(len(source))

    return epoch


@lru_cache(maxsize=4)
def balanced(source: Source, seed: int, shuffle: bool) -> Epoch:
    """Returns the function from an epoch to its images, as many of each class."""
    by_class: dict[int, list[int]] = collections.defaultdict(list)
    for number in range(len(source)):
        by_class[source.label(number)].append(number)
    if len(by_class) < 2:
        raise ConfigError(
            "data.balance=true: the images have one class only; leave data.balance out"
        )
    classes, length = [by_class[label] for label in sorted(by_class)], len(source)

    @lru_cache(maxsize=4096)
    def turn(label: int, number: int) -> Sequence[int]:
        # The order in which a class's images come for the number-th time.
        count = len(classes[label])
        return _permutation(count, [seed, _STREAM, label, number]) if shuffle else range(count)

    @lru_cache(maxsize=2)
    def epoch(number: int) -> Sequence[int]:
        images: list[int] = []
        for label, members in enumerate(classes):
            quota = length // len(classes) + (label < length % len(classes))
            for drawn in range(number * quota, (number + 1) * quota):
                turns, at = divmod(drawn, len(members))
                images.append(members[turn(label, turns)[at]])
        mixed = _permutation(length, [seed, _STREAM, number]) if shuffle else range(length)
        return [images[at] for at in mixed]

    return epoch


def _permutation(length: int, keys: list[int]) -> list[int]:
    order = np.random.Generator(np.random.PCG64(keys)).permutation(length)
    permutation: list[int] = order.tolist()
    return permutation
