"""The plain module in torch's DistributedDataParallel (``settings: {views: true}``: of buckets)."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from hires.bench.bench_rows import BenchRow
from hires.bench.peers.peer_module import ModuleSteps, plain_module
from hires.bench.race import Runner
from hires.engine.device import HOST, RankDevice


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the replica of this rank."""
    module = device.place_module(plain_module(row.config, device.torch == HOST))
    replica = DistributedDataParallel(
        module, gradient_as_bucket_view=row.settings.get("views", False)
    )
    return ModuleSteps(replica, row, rank, device)
