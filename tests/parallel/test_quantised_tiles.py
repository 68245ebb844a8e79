"""Quantised networks: tiles make the bits of one process, layers are within a step of float64."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hires.parallel import quantized_kernels
from hires.plan.operators.windows import pair
from hires.quant import int8_kernels
from tests.helpers.quantised_nets import QuantisedNet, small_quantised
from tests.helpers.small_nets8 import SIZES, network

GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1))
"""No map has fewer rows or columns than these, but the last ones of ``amoebanet`` and ``resnet``
have two rows: tiles get all pixels with those of the image."""


NETS = pytest.mark.parametrize("name", SIZES)


@NETS
def test_tiles_have_the_bits_of_one_process(name):
    net = small_quantised(name)
    whole = net.output()
    for grid in GRIDS if name not in ("amoebanet", "resnet") else GRIDS[:3]:
        assert torch.equal(net.output(grid), whole), grid


@pytest.mark.parametrize("name", ["preact_resnet", "mobile", "efficient", "amoebanet"])
def test_sums_written_over_an_operand_have_the_same_bits(monkeypatch, name):
    net, seen, added = small_quantised(name), [], quantized_kernels.Added

    def spy(*given):
        seen.append(given[2:] == (True,))
        return added(*given)

    monkeypatch.setattr(quantized_kernels, "Added", spy)
    assert torch.equal(net.output_of_stage(), net.output())
    assert any(seen), "no operand is written over"


@NETS
def test_layers_are_within_one_step_of_float64(name):
    errors = small_quantised(name).layer_errors()
    graph = small_quantised(name).graph
    steps = {
        n: e for n, e in errors.items() if graph.by_name[n].dtype == "uint8" or n == graph.output
    }
    assert len(steps) > 8
    assert max(steps.values()) <= 1, {n: e for n, e in steps.items() if e > 1}
    rest = errors.keys() - steps.keys()
    assert max((errors[n] for n in rest), default=0.0) < 1e-5


@pytest.mark.parametrize("name", ["preact_resnet", "mobile", "mixed"])
def test_layers_of_the_largest_numbers_are_within_one_step_of_float64(name):
    """Weights of -127 and 127 only, images of 0 and 255: where sums of 16 bits would saturate."""
    torch.manual_seed(3)
    net = network(name, SIZES[name])
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                module.weight.copy_(module.weight.sign() * module.weight.abs().mean())
    made = QuantisedNet(net, (torch.rand(2, 3, *SIZES[name]) < 0.7).float())
    graph, errors = made.graph, made.layer_errors()
    steps = [e for n, e in errors.items() if graph.by_name[n].dtype == "uint8"]
    assert max(steps) <= 1
    assert torch.equal(made.output((2, 1)), made.output())


@NETS
def test_output_is_near_that_in_float(name):
    net = small_quantised(name)
    exact = net.float_values[net.float_graph.output]
    assert float((net.output() - exact).abs().max() / exact.abs().max()) < 0.12


def test_whole_networks_are_quantised():
    for name in set(SIZES) - {"mixed"}:
        net = small_quantised(name)
        assert not net.graph.kept, net.graph.kept
        real = {n.name for n in net.graph.nodes if n.dtype != "uint8"}
        real -= {f"{net.graph.output}.sum"}  # before an activation of real numbers
        assert len(real) <= 1 + net.kinds["dequantize"], real
    mixed = small_quantised("mixed")
    assert set(mixed.graph.kept.values()) == {
        "elu has no rule for 8-bit integers",
        "softshrink has no rule for 8-bit integers",
    }


@pytest.mark.parametrize("name", ["mobile", "efficient"])
def test_processors_that_saturate_have_the_same_bits(monkeypatch, name):
    net = small_quantised(name)
    whole = net.output()
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda: False)
    with warnings.catch_warnings():
        assert torch.equal(net.output(), whole)


@pytest.mark.parametrize("block", [1, 50, 300])
def test_average_pools_in_blocks_have_the_same_bits(monkeypatch, block):
    pooled = [n for n in SIZES if "q_avg_pool2d" in small_quantised(n).kinds]
    assert pooled
    for name in pooled:
        net = small_quantised(name)
        whole = net.output()
        monkeypatch.setattr(quantized_kernels, "WHOLE", 0)
        monkeypatch.setattr(quantized_kernels, "BLOCK", block)
        assert torch.equal(net.output(), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("block", [40, 2**18])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil", "pads", "divisor"),
    [
        (3, 1, 1, False, False, None),
        (3, 2, 1, True, False, None),
        ([2, 3], [2, 1], [1, 0], False, True, None),
        (2, None, 0, True, True, 5),
    ],
)
def test_average_pool_is_the_rounded_one_of_real_numbers(
    monkeypatch, kernel, stride, padding, ceil, pads, divisor, block
):
    monkeypatch.setattr(quantized_kernels, "WHOLE", 0)
    monkeypatch.setattr(quantized_kernels, "BLOCK", block)
    pool = torch.nn.AvgPool2d(kernel, stride, padding, ceil, pads, divisor)
    x = torch.randint(0, 256, (3, 5, 9, 8), generator=torch.Generator().manual_seed(0))
    expected = pool((x - 77.0).double()) * 0.5 + 12
    args = {"kernel_size": kernel, "stride": stride, "ceil_mode": ceil, "zero_point": 77}
    args |= {"count_include_pad": pads, "divisor_override": divisor, "factor": 0.5}
    args |= {"offset": 12.0, "low": 0, "high": 255}
    sizes = [9, 8]
    axes = [
        SimpleNamespace(stride=s, padding=p, kernel=k, size_in=size)
        for s, p, k, size in zip(
            pair(stride or kernel), pair(padding), pair(kernel), sizes, strict=True
        )
    ]
    rows, cols = expected.shape[2:]
    window = SimpleNamespace(axes=axes, out=(0, rows, 0, cols), padding=pair(padding))
    made = quantized_kernels._avg_pool(window, x.to(torch.uint8), args)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert (made - expected.clamp(0, 255)).abs().max() <= 0.5 + 1e-4
