"""``hires.shard``: the plain module on tiles, in a loop of its user's own."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from hires.bench.bench_rows import BenchRow
from hires.bench.peers.peer_module import ModuleSteps
from hires.bench.race import Runner
from hires.comm import opened_channels, use_channels
from hires.engine.build import whole_model
from hires.engine.device import RankDevice
from hires.engine.loader import whole_microbatches
from hires.engine.sharding import shard


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    device = row.config.device
    return (
        "" if device == "cpu" else f"hires.shard has been tried on the CPU alone, not on {device}"
    )


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the module on this rank's tile."""
    return ShardSteps(row, rank, device)


class ShardSteps(ModuleSteps):
    """The steps of such a loop."""

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        config = row.config
        rows, cols = config.parallel.tiles
        mesh = init_device_mesh(config.device, (rows, cols))
        example = whole_microbatches(config, 0)[0][0]
        module = shard(whole_model(config), mesh, example=example)
        self.channels = opened_channels()
        super().__init__(module, row, rank, device)

    def before_step(self) -> None:
        """Makes the communicators of its tiles those of this rank."""
        super().before_step()
        use_channels(self.channels)
