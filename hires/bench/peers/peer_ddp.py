"""The plain module in torch's DistributedDataParallel (``settings: {views: true}``: of buckets)."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from hires.bench.bench_rows import BenchRow
from hires.bench.peers.peer_module import ModuleSteps, plain_module
from hires.bench.race import Runner
from hires.engine.device import HOST, RankDevice


def lacks(row: BenchRow) -> str:
    """Returns why it cannot run a row."""
    device = row.config.device
    return "" if device in ("cpu", "cuda") else f"torch has no messages of device={device}"


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the replica of this rank."""
    module = device.place_module(plain_module(row.config, device.torch == HOST))
    views = row.settings.get("views", False)
    return ModuleSteps(
        DistributedDataParallel(module, gradient_as_bucket_view=views), row, rank, device
    )
