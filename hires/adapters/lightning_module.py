"""A Lightning module whose network computes on tiles of its images.

    Trainer(strategy="ddp", use_distributed_sampler=False)

Lightning averages gradients over all ranks. Those of the tiles of an image are equal, each that of
the whole image, so the average is that over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset, DistributedSampler

from hires.core.errors import ConfigError
from hires.engine.sharding import ShardedModule, shard, window


class TiledLightningModule(LightningModule):
    """Shards ``self.model`` in ``configure_model``, before DDP and the optimiser see it.

    ``mesh`` has the dims ``dp``, ``rows`` and ``cols``; ``tiles``, ``example`` and ``gather`` are
    those of :func:`hires.shard`. Steps and optimisers are the user's, in a class of their own.
    """

    mesh: Any

    def __init__(
        self, model: nn.Module, tiles: Sequence[int], example: Tensor, gather: str = "full"
    ) -> None:
        super().__init__()
        self.model: nn.Module = model
        self._tiling = [*tiles], example, gather

    def configure_model(self) -> None:
        """Makes the mesh, and puts the network on tiles; ConfigError: it cannot run on them."""
        if isinstance(self.model, ShardedModule):
            return  # Lightning calls it before each fit, test and prediction
        tiles, example, gather = self._tiling
        world, device = self.trainer.world_size, self.trainer.strategy.root_device
        replicas, rest = divmod(world, tiles[0] * tiles[1])
        if rest or not replicas:
            raise ConfigError(f"{world} ranks are not a multiple of tiles={tiles}; use other tiles")
        names = ("dp", "rows", "cols")
        self.mesh = init_device_mesh(device.type, (replicas, *tiles), mesh_dim_names=names)
        self.model = shard(
            self.model.to(device),
            self.mesh["rows", "cols"],
            example=example.to(device),
            gather=gather,
        )

    def window(self, images: Tensor) -> tuple[Any, ...]:
        """Returns the index of this rank's window of whole images or maps (``gather="local"``)."""
        return (..., *window(images.shape, self.mesh["rows", "cols"]))

    def sampler(self, images: Dataset[Any], **more: Any) -> DistributedSampler[Any]:
        """Returns the sampler of a loader: a part for each replica, the same one for its tiles."""
        place = {"num_replicas": self.mesh["dp"].size(), "rank": self.mesh.get_local_rank("dp")}
        return DistributedSampler(images, **place, **more)
