"""Orders images so that a training sees every class equally often: ``data.balance``.

classes          a a a a a a b b c          9 images: 3 of each class an epoch
epoch 0, 1       a a a b b b c c c          a: three of its six, then the other three
                 a a a b b b c c c          b, c: each of theirs before one comes again
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sized
from functools import lru_cache, partial

import numpy as np

from hires.core.errors import ConfigError

_STREAM = 0x62616C
"""Sets these numbers apart from those that are drawn of the same seed elsewhere."""


def balanced_order(source: Sized, seed: int, shuffle: bool) -> Callable[[int], tuple[int, ...]]:
    """Returns the function from an epoch to its images; ConfigError: they have no classes."""
    by_class: dict[int, list[int]] = collections.defaultdict(list)
    for number, label in enumerate(_labels(source)):
        by_class[label].append(number)
    if len(by_class) < 2:
        raise ConfigError(
            "data.balance=true: the images have one class only; leave data.balance out"
        )
    held = tuple(tuple(by_class[label]) for label in sorted(by_class))
    return partial(_epoch, held, seed, shuffle)


def _labels(source: Sized) -> list[int]:
    label = getattr(source, "label", None)  # pairs have none
    return [] if label is None else [label(number) for number in range(len(source))]


@lru_cache(maxsize=2)  # a step touches the end of one epoch and the start of the next
def _epoch(
    by_class: tuple[tuple[int, ...], ...], seed: int, shuffle: bool, epoch: int
) -> tuple[int, ...]:
    length, made = sum(map(len, by_class)), list[int]()
    for label, numbers in enumerate(by_class):
        quota = length // len(by_class) + (label < length % len(by_class))
        for drawn in range(epoch * quota, (epoch + 1) * quota):
            turn, place = divmod(drawn, len(numbers))
            made.append(numbers[_turn(len(numbers), seed, shuffle, label, turn)[place]])
    if not shuffle:
        return tuple(made)
    order = np.random.Generator(np.random.PCG64([seed, _STREAM, epoch])).permutation(length)
    return tuple(made[place] for place in order.tolist())


@lru_cache(maxsize=4096)
def _turn(length: int, seed: int, shuffle: bool, label: int, turn: int) -> tuple[int, ...]:
    # The order in which a class's images come, from the first to the last, the turn-th time.
    if not shuffle:
        return tuple(range(length))
    keys = [seed, _STREAM, label, turn]
    return tuple(np.random.Generator(np.random.PCG64(keys)).permutation(length).tolist())
