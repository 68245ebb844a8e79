"""Infers whole images on tiles, in place of MONAI's ``SlidingWindowInferer``.

A sliding window computes overlapping patches and averages what they disagree about; tiles borrow
the rows that they lack, so the output is that of the network on the whole image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from monai.data import MetaTensor
from monai.inferers import Inferer
from torch import Tensor

from hires.core.errors import ConfigError
from hires.engine.sharding import ShardedModule, shard


class TiledInferer(Inferer):
    """Calls a network on tiles of the images; all ranks of the mesh call it together.

    It shards the network of the first call, and another one when it gets that. Arguments are those
    of :func:`hires.shard`.
    """

    def __init__(
        self, mesh: Any, *, gather: str = "full", tiles: Sequence[int] | None = None
    ) -> None:
        self._keys = {"mesh": mesh, "gather": gather, "tiles": tiles}
        self._network: Any = None
        self._sharded: ShardedModule | None = None

    def __call__(self, inputs: Tensor, network: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Returns the output of whole images, (n, C, H, W), with the metadata of a ``MetaTensor``.

        ConfigError: the network is no module, takes more than images, or cannot run on tiles.
        """
        if args or more or not isinstance(network, torch.nn.Module):
            raise ConfigError("TiledInferer calls a torch.nn.Module on images alone")
        if self._sharded is None or self._network is not network:
            self._sharded = shard(network, example=inputs, **self._keys)
            self._network = network
        made = self._sharded(inputs, size=inputs.shape[2:])
        return MetaTensor(made).copy_meta_from(inputs) if isinstance(inputs, MetaTensor) else made
