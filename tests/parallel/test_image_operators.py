"""Operators that read neighbours, statistics or random numbers equal torch's own in any tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net

GRIDS = ((2, 2), (3, 1), (1, 4), (5, 2))

PADS = {
    "reflect": lambda n, x: F.pad(x, (3, 1, 0, 4), "reflect"),
    "replicate": lambda n, x: F.pad(x, (0, 7, 12, 1), "replicate"),
    "circular": lambda n, x: F.pad(x, (2, 3, 1, 9), "circular"),
    "reflect with a crop": lambda n, x: F.pad(x, (-2, 3, 1, -3), "reflect"),
    "channels": lambda n, x: F.pad(x, (0, 0, 0, 0, 1, 2), value=0.5),
    "channels and pixels": lambda n, x: F.pad(x, (1, -2, 3, 0, 2, -1)),
    "module": lambda n, x: nn.ReflectionPad2d((1, 2, 3, 0))(x),
    "op": lambda n, x: torch.ops.aten.replication_pad2d(x, [1, 0, 2, 3]),
    "convolution": lambda n, x: F.relu(n.op(x)) + x,
    "roll": lambda n, x: x.roll((3, -2), (2, 3)),
    "roll rows": lambda n, x: torch.roll(x, -4, 2),
}


@pytest.mark.parametrize("name", PADS)
def test_pads_and_rolls(name: str):
    op = nn.Conv2d(3, 3, 3, padding=2, dilation=2, padding_mode="circular")
    check_tiles(Net(PADS[name], op=op), (2, 3, 10, 8), *GRIDS)


SCALINGS = [
    {"size": (4, 21), "mode": "bicubic"},
    {"size": (13, 5), "mode": "bicubic", "align_corners": True},
    {"scale_factor": (1.7, 0.6), "mode": "bicubic"},
    {"size": (13, 1), "mode": "bilinear", "align_corners": True},
    {"size": (10, 21), "mode": "bilinear"},
    {"scale_factor": 0.4, "mode": "bilinear", "antialias": True},
    {"size": (3, 17), "mode": "bicubic", "antialias": True},
    {"size": (4, 13), "mode": "area"},
    {"size": (7, 19), "mode": "nearest"},
    {"size": (7, 19), "mode": "nearest-exact"},
]


@pytest.mark.parametrize("keys", SCALINGS, ids=str)
def test_interpolation(keys: dict):
    check_tiles(Net(lambda n, x: F.interpolate(x, **keys)), (2, 3, 10, 8), *GRIDS)


POOLS = {
    "bins": lambda n, x: F.adaptive_avg_pool2d(x, (3, 5)),
    "more bins than pixels": lambda n, x: F.adaptive_avg_pool2d(x, (13, 9)),
    "strip": lambda n, x: F.adaptive_avg_pool2d(x, (None, 1)),
    "maxima": lambda n, x: F.adaptive_max_pool2d(x, (3, 5)),
    "overlapping maxima": lambda n, x: F.adaptive_max_pool2d(x, (7, 3)),
    "global maximum": lambda n, x: F.adaptive_max_pool2d(x, 1),
    "powers": lambda n, x: F.lp_pool2d(x.abs() + 1, 3, 3, 2),
    "unshuffle": lambda n, x: F.pixel_unshuffle(x, 2),
    "channel shuffle": lambda n, x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("ties", [False, True])
def test_pools(name: str, ties: bool):
    check_tiles(Net(POOLS[name]), (2, 4, 10, 8), *GRIDS, ties=ties)


REDUCTIONS: dict[str, Forward] = {
    "sum": lambda n, x: x.sum((2, 3)),
    "sum of all": lambda n, x: x.sum(),
    "sum over channels too": lambda n, x: x.sum((1, 2, 3), keepdim=True),
    "mean": lambda n, x: x.mean((-2, -1), keepdim=True),
    "amax": lambda n, x: x.amax((2, 3)),
    "amin": lambda n, x: x.amin((1, 2, 3), keepdim=True),
    "var": lambda n, x: x.var((2, 3), keepdim=True),
    "biased var": lambda n, x: torch.var(x, (2, 3), unbiased=False),
    "std": lambda n, x: x.std((1, 2, 3), correction=0),
    "var_mean": lambda n, x: torch.stack(torch.var_mean(x, (2, 3), keepdim=True)),
    "std_mean": lambda n, x: sum(torch.std_mean(x, (2, 3))),
    "norm": lambda n, x: torch.norm(x, p=2, dim=(2, 3), keepdim=True),
    "vector norm": lambda n, x: torch.linalg.vector_norm(x, 3, (2, 3)),
    "logsumexp": lambda n, x: x.logsumexp((2, 3)),
    "prod": lambda n, x: (1 + 0.01 * x).prod(),
    "max of all": lambda n, x: x.max() - x.min() * x.sum((2, 3)),
    "response": lambda n, x: x * x.norm(p=2, dim=(2, 3), keepdim=True) + x.amax((2, 3), True),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("ties", [False, True])
def test_reductions_over_the_image(name: str, ties: bool):
    check_tiles(Net(REDUCTIONS[name]), (2, 4, 5, 3), (2, 2), (1, 4), (6, 1), ties=ties)


ALONG: dict[str, Callable[[Tensor, int, bool], Tensor]] = {
    "sum": lambda x, dim, keep: x.sum(dim, keep),
    "mean": lambda x, dim, keep: x.mean(dim, keep),
    "prod": lambda x, dim, keep: (1 + 0.1 * x).prod(dim, keep),
    "prod of zeros": lambda x, dim, keep: x.relu().prod(dim, keep),
    "logsumexp": lambda x, dim, keep: x.logsumexp(dim, keep),
    "amax": lambda x, dim, keep: x.amax(dim, keep),
    "amin": lambda x, dim, keep: x.amin(dim, keep),
    "var": lambda x, dim, keep: x.var(dim, keepdim=keep),
    "std": lambda x, dim, keep: x.std(dim, correction=0, keepdim=keep),
    "var_mean": lambda x, dim, keep: sum(torch.var_mean(x, dim, keepdim=keep)),
    "std_mean": lambda x, dim, keep: sum(torch.std_mean(x, dim, keepdim=keep)),
    "norm": lambda x, dim, keep: x.norm(1, dim, keep),
    "vector norm": lambda x, dim, keep: torch.linalg.vector_norm(x, 3, dim, keep),
}


DIMS: dict[str, tuple[Forward, tuple[int, int]]] = {
    "rows": (lambda along, x: along(x, 2, False) * along(x, 2, True)[:, :, 0], (2, 1)),
    "columns": (lambda along, x: along(x, 3, False) * along(x, 3, True)[..., 0], (1, 3)),
    "no row for some": (lambda along, x: along(x, 2, False), (6, 1)),
    "pixels": (lambda along, x: along(x.flatten(2), -1, False), (2, 1)),
    "pixels of a grid": (lambda along, x: along(x.flatten(2), 2, True).squeeze(2), (2, 2)),
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("ties", [False, True])
def test_reductions_along_one_dim(name: str, dims: str, ties: bool):
    forward, grid = DIMS[dims]
    check_tiles(Net(lambda n, x: forward(ALONG[name], x)), (2, 3, 5, 4), grid, ties=ties)


NORMS: dict[str, nn.Module] = {
    "group": nn.GroupNorm(2, 4),
    "group of all": nn.GroupNorm(1, 4, affine=False),
    "instance": nn.InstanceNorm2d(4),
    "affine instance": nn.InstanceNorm2d(4, affine=True),
    "tracking instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.3),
    "layer": nn.LayerNorm([4, 9, 7]),
    "layer of channels": nn.LayerNorm([9, 7]),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [False, True])
def test_norms_of_samples(name: str, training: bool):
    module = NORMS[name]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    net = Net(lambda n, x: n.conv(F.relu(n.op(n.stem(x)))), op=module)
    net.stem, net.conv = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    # The convolution behind asks for a border: it is normalised, and counts with its owner only.
    check_tiles(net, (2, 4, 9, 7), (2, 2), (3, 1), (1, 7), training=training)


HAND_MADE: dict[str, Forward] = {
    "layer norm": lambda n, x: (x - x.mean(1, True)) / (x.var(1, keepdim=True) + 1e-6).sqrt(),
    "rms norm": lambda n, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "instance norm": lambda n, x: (x - x.mean((2, 3), True)) / (x.std((2, 3), keepdim=True) + 1e-6),
    "channels": lambda n, x: x * torch.sigmoid(torch.max(x, 1, keepdim=True)[0]),
    "two maps": lambda n, x: torch.max(x, -x),
    "gate": lambda n, x: x * torch.sigmoid(x.amax((2, 3), True) + x.mean((2, 3), True)),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_norms_and_gates_written_by_hand(name: str):
    check_tiles(Net(HAND_MADE[name]), (2, 4, 9, 7), (2, 2), (3, 1))
