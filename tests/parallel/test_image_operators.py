"""Operators that read neighbours, statistics or random numbers equal torch's own in any tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.parallel import reductions
from tests.helpers.custom_nets import SampleNorms
from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net, tiled

PADS: dict[str, Forward] = {
    "reflect": lambda n, x: F.pad(x, (3, 1, 0, 4), "reflect"),
    "replicate": lambda n, x: F.pad(x, (0, 7, 12, 1), "replicate"),
    "circular": lambda n, x: F.pad(x, (2, 3, 1, 9), "circular"),
    "reflect with a crop": lambda n, x: F.pad(x, (-2, 3, 1, -3), "reflect"),
    "channels and pixels": lambda n, x: F.pad(x, (1, -2, 3, 0, 2, -1)),
    "module": lambda n, x: nn.ReflectionPad2d((1, 2, 3, 0))(x),
    "op": lambda n, x: torch.ops.aten.replication_pad2d(x, [1, 0, 2, 3]),
    "circular convolution": lambda n, x: F.relu(n.op(x)) + x,
    "roll": lambda n, x: x.roll((3, -2), (2, 3)),
}
SCALINGS: list[dict[str, Any]] = [
    {"size": (4, 21), "mode": "bicubic"},
    {"size": (13, 5), "mode": "bicubic", "align_corners": True},
    {"scale_factor": (1.7, 0.6), "mode": "bicubic"},
    {"size": (13, 1), "mode": "bilinear", "align_corners": True},
    {"size": (10, 21), "mode": "bilinear"},
    {"scale_factor": 0.4, "mode": "bilinear", "antialias": True},
    {"size": (3, 17), "mode": "bicubic", "antialias": True},
    {"size": (4, 13), "mode": "area"},
    {"size": (7, 19), "mode": "nearest-exact"},
]
POOLS: dict[str, Forward] = {
    "bins": lambda n, x: F.adaptive_avg_pool2d(x, (3, 5)),
    "more bins than pixels": lambda n, x: F.adaptive_avg_pool2d(x, (13, 9)),
    "strip": lambda n, x: F.adaptive_avg_pool2d(x, (None, 1)),
    "maxima": lambda n, x: F.adaptive_max_pool2d(x, (3, 5)),
    "overlapping maxima": lambda n, x: F.adaptive_max_pool2d(x, (7, 3)),
    "global maxima": lambda n, x: F.adaptive_max_pool2d(x, 1),
    "powers": lambda n, x: F.lp_pool2d(x.abs() + 1, 3, 3, 2),
    "unshuffle": lambda n, x: F.pixel_unshuffle(x, 2),
    "channel shuffle": lambda n, x: F.channel_shuffle(x, 2),
}
TURNS: dict[str, Forward] = {
    "there and back": lambda n, x: (
        x * x.roll(1, 3) + x.roll(-1, 3) * F.pad(x, (1, 1, 1, 1))[:, :, 2:, 2:]
    ),
    "half": lambda n, x: x.roll(4, 2) - x,
    "all around": lambda n, x: F.pad(x, (7, 7, 8, 8), "circular"),
    "convolutions": lambda n, x: n.op(n.op(x)),
}
HAND_MADE: dict[str, Forward] = {
    "layer norm": lambda n, x: (x - x.mean(1, True)) / (x.var(1, keepdim=True) + 1e-6).sqrt(),
    "instance norm": lambda n, x: (x - x.mean((2, 3), True)) / (x.std((2, 3), keepdim=True) + 1e-6),
    "channels": lambda n, x: x * torch.sigmoid(torch.max(x, 1, keepdim=True)[0]),
    "gate": lambda n, x: x * torch.sigmoid(x.amax((2, 3), True) + x.mean((2, 3), True)),
    "maximum of negatives": lambda n, x: F.max_pool2d(-(x * x) - 1, 3, 2, 1),  # no padding wins
}
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
BY_SCALE = {str(keys): lambda n, x, keys=keys: F.interpolate(x, **keys) for keys in SCALINGS}
GRIDS = (2, 2), (5, 1), (1, 4)
TABLES: list[tuple[dict[str, Forward], tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    (PADS, (2, 3, 10, 8), GRIDS),
    (BY_SCALE, (2, 3, 10, 8), GRIDS),
    (POOLS, (2, 4, 10, 8), GRIDS),
    (TURNS, (2, 4, 8, 7), ((2, 2), (5, 3), (8, 1))),
    (HAND_MADE, (2, 4, 9, 7), ((2, 2), (3, 1))),
    (REDUCTIONS, (2, 4, 5, 3), ((2, 2), (1, 4), (6, 1))),
]
CASES = {name: (table[name], *facts) for table, *facts in TABLES for name in table}


@pytest.mark.parametrize("name", CASES)
def test_operators_that_read_neighbours(name: str):
    forward, shape, grids = CASES[name]
    op = nn.Conv2d(shape[1], shape[1], 3, padding=2, dilation=2, padding_mode="circular")
    check_tiles(Net(forward, op=op), shape, *grids, ties="max" in name or "min" in name)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance_whose_correction_leaves_no_number_is_that_of_torch():
    x = torch.tensor([[1.0, 3.0], [5.0, 5.0]], dtype=torch.float64)
    facts = reductions.Reduced(
        {"correction": 2}, [0], False, (0, 1, 0, 2), [], torch.ones(1, dtype=torch.float64), 2
    )
    sent = torch.stack([x.mean(1), x.var(1, correction=0)])[None]
    made = reductions.REDUCTIONS["var"].combine(sent, facts)
    torch.testing.assert_close(made, x.var(1, correction=2), equal_nan=True)


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
    "max": lambda x, dim, keep: x.max(dim, keep)[0],
    "min": lambda x, dim, keep: x.min(dim, keep).values + 0.1 * x.min(dim, keep).indices,
    "argmax": lambda x, dim, keep: x.sum(dim, keep) * x.argmax(dim, keep),
    "argmin": lambda x, dim, keep: x.mean(dim, keep) * x.argmin(dim, keep),
}


DIMS: dict[str, tuple[Forward, tuple[int, int]]] = {
    "rows": (lambda along, x: along(x, 2, False) * along(x, 2, True)[:, :, 0], (2, 1)),
    "no row for some": (lambda along, x: along(x, 2, False), (6, 1)),
    "pixels of a grid": (lambda along, x: along(x.flatten(2), 2, True).squeeze(2), (2, 2)),
    "more tiles than pixels": (lambda along, x: along(x, 3, False), (2, 5)),
    "columns and channels": (lambda along, x: along(along(x, 1, True), 3, False), (2, 2)),
    "last dims": (lambda along, x: along(x.permute(0, 2, 3, 1), 1, False), (2, 3)),
}


@pytest.mark.parametrize("name", ALONG)
def test_reductions_along_one_dim(name: str):
    for forward, grid in DIMS.values():
        net = Net(lambda n, x, forward=forward: forward(ALONG[name], x))
        check_tiles(net, (2, 3, 5, 4), grid, ties="max" in name or "min" in name)


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
def test_norms_of_samples(name: str):
    module = NORMS[name]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    net = Net(lambda n, x: n.conv(F.relu(n.op(n.stem(x)))), op=module)
    net.stem, net.conv = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    # The convolution behind asks for a border: it is normalised, and counts with its owner only.
    for training in (False, True):
        check_tiles(net, (2, 4, 9, 7), (2, 2), (1, 7), training=training)


def test_norms_of_samples_that_share_their_messages():
    # Tiles hold more than they own: their neighbours' pixels, which count there only.
    grids = (2, 2), (3, 1), (1, 6)
    check_tiles(SampleNorms((10, 11), maps=True), (2, 3, 10, 11), *grids, joint=True)


CHANNELS: dict[str, Forward] = {
    "list": lambda n, x: x[:, [2, 0, 1, 1]] * x[:, [3]],
    "list of samples and channels": lambda n, x: x[[[1], [0]], [[2, 0, 3]]],
    "index_select": lambda n, x: x.index_select(1, torch.tensor([3, 3, 0])),
    "gather": lambda n, x: x.gather(1, x.argsort(1)[:, :3]),
    "gather of a whole index": lambda n, x: x.gather(1, n.index.expand(2, 3, 9, 7)),
    "take_along_dim": lambda n, x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
    "scatter": lambda n, x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0) * x,
    "scatter_add": lambda n, x: x.scatter_add(1, x.argsort(1), x * x),
    "argmax": lambda n, x: x * x.argmax(1, keepdim=True) + x.argmin(1).unsqueeze(1),
    "topk": lambda n, x: torch.cat(x.topk(2, 1), 1),
    "largest": lambda n, x: x.topk(3, dim=1)[0],
    "sort": lambda n, x: x.sort(1, descending=True).values * x.argsort(1),
    "median": lambda n, x: x.median(1, keepdim=True)[0] + x.kthvalue(3, 1)[0].unsqueeze(1),
    "cumprod": lambda n, x: x.cumprod(1) + x.cummax(1)[0] + x.logcumsumexp(1),
    "repeat": lambda n, x: x.repeat(1, 2, 1, 1) * torch.tile(x, (1, 2, 1, 1)),
    "repeat_interleave": lambda n, x: x.repeat_interleave(3, 1),
    "any": lambda n, x: x * (x > 0).any(1, keepdim=True) * (x > -1).all(1).unsqueeze(1),
    "table": lambda n, x: n.table(x.argmax(1)).permute(0, 3, 1, 2) * x,
    "rows of a table": lambda n, x: n.table.weight[x.argmax(1)].movedim(3, 1) * x,
    "flip": lambda n, x: x.flip(1) + torch.maximum(x, n.index[:, :1]),
    "bits": lambda n, x: x * ((x > 0) & (x < 1) | ~(x > -1)),
    "bounds": lambda n, x: x.clamp(min=x.flip(1)) + torch.where(x > 0, x, 2.0).hypot(x),
    "two maps": lambda n, x: x * F.cosine_similarity(x, x.flip(1)).unsqueeze(1),
    "a map and a vector": lambda n, x: F.cosine_similarity(x, x.mean((2, 3), True), 1)[:, None] * x,
    "copies of rows": lambda n, x: x.repeat_interleave(2, 2).repeat_interleave(3, 3),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_operators_along_channels(name: str):
    net = Net(CHANNELS[name], table=nn.Embedding(4, 4))
    net.register_buffer("index", torch.tensor([2, 0, 1])[None, :, None, None])
    graph = check_tiles(net, (2, 4, 9, 7), (2, 2), (3, 1))
    stage, findings = tiled(graph)
    assert not findings
    assert not any("gather0" in value for value in stage.layout)


SOFTMAX: dict[str, Forward] = {
    "pixels": lambda n, x: x.flatten(2).softmax(-1).view_as(x) * x,
    "tokens": lambda n, x: (x.flatten(2).transpose(1, 2).softmax(1) * 3).transpose(1, 2).view_as(x),
    "columns": lambda n, x: x.softmax(3) + x.log_softmax(2),
    "log of pixels": lambda n, x: F.log_softmax(x.flatten(2), 2).view_as(x),
    "context": lambda n, x: x.flatten(2) @ x[:, :1].flatten(2).softmax(2).mT,
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_over_the_image(name: str):
    graph = check_tiles(Net(SOFTMAX[name]), (2, 4, 9, 7), (2, 1), (2, 2), (1, 9))
    stage, findings = tiled(graph, (2, 1))
    assert not findings
    assert not any("gather0" in value for value in stage.layout)
