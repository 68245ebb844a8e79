"""Chooses the images of a step.

    epoch 0          epoch 1          epoch 2           each a permutation of the data set
    [ 3 0 4 1 2 ]    [ 1 4 0 2 3 ]    [ 2 ...           (in order without data.shuffle)
     step 0  | step 1   | step 2   |                    batch = 3

Steps run over the ends of epochs, so no image is dropped. The list depends on the arguments alone:
every rank computes the same one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def step_indices(step: int, batch: int, length: int, seed: int, shuffle: bool) -> list[int]:
    """Returns the images of one step, for the whole world.

    Args:
        step: number of the step, from 0.
        batch: images per step; may exceed ``length``.
        length: images of the data set.
        seed: decides the permutations.
        shuffle: whether every epoch has a permutation of its own, or all go in order.

    Returns:
        ``batch`` indices, in the order in which replicas and microbatches take them.
    """
    assert step >= 0
    assert min(batch, length) >= 1
    indices: list[int] = []
    position = step * batch
    end = position + batch
    while position < end:
        epoch, offset = divmod(position, length)
        count = min(length - offset, end - position)
        if shuffle:
            indices += _permutation(seed, epoch, length)[offset : offset + count].tolist()
        else:
            indices += range(offset, offset + count)
        position += count
    return indices


@lru_cache(maxsize=2)  # a step touches the end of one epoch and the start of the next
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Returns the order of one epoch, (length,)."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)
    order.setflags(write=False)  # it is shared through the cache
    return order
