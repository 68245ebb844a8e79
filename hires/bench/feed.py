"""Where do the images of a benchmark come from? They are made once and used again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from hires.core.config.run_config import RunConfig
from hires.data.source import open_data
from hires.engine.build import image_dtype, samples_of, target_of
from hires.engine.loader import Loader, Microbatch

Example = tuple[Tensor, Tensor]
"""Images (n, C, H, W), channels_last, of one microbatch, and what they are compared with."""


class Replay:
    """A feed that repeats its microbatches for ever."""

    def __init__(self, by_direction: Iterable[Iterable[Microbatch]]) -> None:
        self._by_direction = [itertools.cycle([*one]) for one in by_direction]

    def next_microbatch(self, direction: int = 0) -> Microbatch:
        """Returns the next microbatch of a direction."""
        return next(self._by_direction[direction])


def whole_microbatches(config: RunConfig, replica: int) -> list[Example]:
    """Returns the microbatches of a replica's first step, whole images."""
    source = open_data(config)
    loader = Loader(
        source,
        order=lambda step: samples_of(config, source, step, replica),
        num_microbatches=config.parallel.pieces // config.parallel.replicas,
        rows=(0, config.height),
        cols=(0, config.width),
        target=target_of(source, config.target_rect),
        steps=1,
        prefetch=0,
        dtype=image_dtype(config),
    )
    examples = []
    for images, target in loader:
        assert images is not None
        assert target is not None
        examples.append((images, target))
    return examples


def whole_batch(config: RunConfig, replica: int) -> Example:
    """Returns the microbatches of a replica's first step as one."""
    images, targets = zip(*whole_microbatches(config, replica), strict=True)
    return torch.cat(images).contiguous(memory_format=torch.channels_last), torch.cat(targets)
