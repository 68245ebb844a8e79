"""Which operations tiles can compute, and the rows that interpolation reads; others are named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import PlanError
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.rules import rule_in, window_axes_of
from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net, tiled, traced


def write_to_channels(n: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2] = y[:, 2:] + 1
    y[:, 3:] = 0
    y[:, -2] = y[:, 0]
    return y


@pytest.mark.parametrize(
    "forward",
    [
        write_to_channels,
        lambda n, x: 1 / (x + 2) - torch.where(x > 0, x, 0.5 * x),
        lambda n, x: x.masked_fill(x.isnan(), 0.0).clamp(-1, 1),
        lambda n, x: (x.double() + torch.zeros_like(x)).float().contiguous() ** 2,
        lambda n, x: x * n.scale + n.one,
        lambda n, x: torch.cat([x, x[:, :2], *x.chunk(2, 1), *x.split([1, 3], 1)], dim=-3),
        lambda n, x: F.glu(x, 1) * x.mean(1, keepdim=True) + x.amax((1,), keepdim=True),
    ],
)
def test_numbers_on_their_own_and_channels_stay_in_their_tile(forward):
    parts = {"scale": nn.Parameter(torch.ones(4, 1, 1)), "one": nn.Parameter(torch.ones(1))}
    graph = traced(forward, **parts)
    stage, findings = tiled(graph)
    assert not findings
    assert {rule_in(stage, node, graph).kind for node in graph.nodes} == {"pointwise"}


# Windows of every kind, sizes that do not divide, borders that differ.
LAYERS = (
    nn.Conv2d(4, 3, 3, 2, 1),
    nn.Conv2d(4, 3, 7, 3, 3),
    nn.Conv2d(4, 4, 3, padding=4, dilation=4, groups=2),
    nn.Conv2d(4, 4, (4, 2), padding=(1, 0)),
    nn.Conv2d(4, 4, (4, 3), padding="same", dilation=(1, 3)),
    nn.Conv2d(4, 4, 2, padding="valid"),
    nn.ConvTranspose2d(4, 2, 4, 3, 1, 1, dilation=2),
    nn.ConvTranspose2d(4, 4, 2, 2, groups=2, bias=False),
    nn.ConvTranspose2d(4, 2, 3, 1, 2),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    nn.MaxPool2d((2, 3), 1, dilation=2),
    nn.AvgPool2d((2, 3), (2, 1), (1, 1), count_include_pad=False),
    nn.AvgPool2d(4, 3, 1, ceil_mode=True),
)
WINDOWED: list[Forward] = [
    lambda n, x: F.pad(x, (2, -1, 0, 3), value=0.5),
    lambda n, x: F.pad(x, (-3, 4)),
    lambda n, x: x[:, :, 1:, :-2],
    lambda n, x: x[:, :, -5:-1],
    lambda n, x: x[..., 1::3],
    lambda n, x: F.pixel_shuffle(x, 2),
]


@pytest.mark.parametrize("part", range(2))
def test_output_of_a_tile_reads_no_pixel_outside_its_need(part):
    nets = [Net(lambda n, x: n.op(x), op=layer) for layer in LAYERS]
    for net in [*nets, *map(Net, WINDOWED)][part::2]:
        check_tiles(net, (2, 4, 9, 8), (2, 2), (3, 1), (1, 4))


REFUSED: dict[str, Forward] = {
    "flatten": lambda n, x: x.flatten(1),
    "permute": lambda n, x: x.permute(0, 2, 3, 1),
    "select": lambda n, x: x[:, :, 0],
    "cat": lambda n, x: torch.cat([x, x], dim=2),
    "flip": lambda n, x: x.flip(2),
    "rot90": lambda n, x: torch.rot90(x, 1, (2, 3)),
    "_safe_softmax": lambda n, x: torch.ops.aten._safe_softmax(x, 3),
    "argmax": lambda n, x: x.argmax(),
    "argmax of channels": lambda n, x: x.flatten(1).argmax(1),
    "conv2d": lambda n, x: F.conv2d(x, x[:, :, :1, :1]),
    "add": lambda n, x: x[..., :4, :4] + x[..., :4, :4].transpose(2, 3),
    "sum": lambda n, x: x.sum((2, 3), dtype=torch.float64),
    "layer_norm": lambda n, x: F.layer_norm(x, (8,)),
    "linalg_vector_norm": lambda n, x: x.norm(torch.inf, (2, 3)),
    "linear": lambda n, x: F.linear(x, n.weight),
    "pad": lambda n, x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)),
    "roll": lambda n, x: x.roll(1),
    "max_pool2d_with_indices": lambda n, x: F.max_pool2d(x, 2, return_indices=True)[0],
    "gather": lambda n, x: x.gather(2, x[:, :, :2].argsort(1)),
    "index": lambda n, x: x[:, :, [2, 0]],
    "multinomial": lambda n, x: torch.multinomial(x.exp().mean(1).flatten(1), 2) * 1.0,
}


def test_operation_without_rule_is_named():
    for kind, forward in REFUSED.items():
        graph = traced(forward, weight=nn.Parameter(torch.ones(8, 8)))
        [finding] = tiled(graph)[1]
        text = rf"tiles cannot divide \S+ \({kind.split()[0]}: .+\).*; .+"
        assert (finding.severity, bool(re.fullmatch(text, finding.text))) == ("error", True), kind


def test_rule_that_makes_another_shape_than_torch_is_not_used():
    graph = traced(lambda n, x: x.permute(0, 2, 3, 1).relu() + 1)
    graph.nodes[0].args["dims"] = [0, 3, 2, 1]
    assert any("permute" in finding.text for finding in tiled(graph)[1])
    graph.nodes[0].args["dims"] = [0, 2, 3, 7]  # a rule that fails names the node and the cause
    with pytest.raises(PlanError, match=r"permute.*IndexError"):
        tiled(graph)


OPERATORS = {
    "nearest": "upsample_nearest2d",
    "nearest-exact": "_upsample_nearest_exact2d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
}


LENGTHS = (1, 2, 3, 7, 13, 40)
TARGETS = (1, 2, 3, 6, 14, 27, 41, 80)
FACTORS = (0.3, 2 / 3, 0.9, 1.0, 1.1, 1.5, 2.3)


def check_rows(length: int, mode: str, **keys: Any) -> None:
    """Compares what a row of an interpolation is made of with PyTorch's own result."""
    # Rows hold their own index; PyTorch has a kernel for either memory order.
    rows = torch.arange(length, dtype=torch.float64).view(1, 1, -1, 1).expand(1, 8, length, 2)
    orders = (torch.channels_last, torch.contiguous_format)
    expected = [
        F.interpolate(rows.contiguous(memory_format=order), mode=mode, **keys) for order in orders
    ]
    factor = None if keys.get("recompute_scale_factor") else keys.get("scale_factor")
    args = {"input": {"value": INPUT}, "scale_factors": factor}
    args["align_corners"] = keys.get("align_corners")
    op = f"_{OPERATORS[mode]}_aa" if keys.get("antialias") else OPERATORS[mode]
    node = Node("up", f"{op}.vec", args, [*expected[0].shape], "float64")
    axis = window_axes_of(node, Graph([node], "up", [1, 8, length, 2]))[0]
    made = [sum(row * part for row, part in axis.taps(out)) for out in range(axis.size_out)]
    for result in expected:
        assert made == pytest.approx(result[0, 0, :, 0].tolist(), abs=1e-12)


# Nearest was computed in double precision, and without PyTorch's special cases: an image of 2 rows
# enlarged by 1.1 keeps its rows, one enlarged to 41 takes row 0 for row 20, which lies halfway.
@pytest.mark.parametrize("mode", OPERATORS)
def test_sources_for_every_size_and_scale_factor(mode):
    smooth = mode in ("bilinear", "bicubic")
    for length in LENGTHS:
        for target in TARGETS:
            check_rows(length, mode, size=(target, 2))
            for how in ("align_corners", "antialias") if smooth else ():
                check_rows(length, mode, size=(target, 2), **{how: True})
        for factor in (factor for factor in FACTORS if int(length * factor) > 0):
            check_rows(length, mode, scale_factor=(factor, 1.0))
            check_rows(length, mode, scale_factor=(factor, 1.0), recompute_scale_factor=True)
            for how in ("align_corners", "antialias") if smooth else ():
                check_rows(length, mode, scale_factor=(factor, 1.0), **{how: True})
