"""Quantised networks: tiles make the bits of one process, layers are within a step of float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hires.parallel import quantized_kernels
from hires.plan.operators.windows import pair
from hires.quant import int8_kernels
from tests.helpers import int7_process
from tests.helpers.launches import ROOT
from tests.helpers.quantised_nets import QuantisedNet, small_quantised
from tests.helpers.small_nets8 import SIZES, network


@pytest.mark.parametrize("largest", [127, 63])
@pytest.mark.parametrize("name", SIZES)
def test_layers_are_within_one_step_of_float64(name: str, largest: int):
    net = small_quantised(name, largest)
    errors, graph = net.layer_errors(), net.graph
    steps = {n for n in errors if graph.by_name[n].dtype == "uint8" or n == graph.output}
    assert len(steps) > 8
    assert max(errors[n] for n in steps) <= 1, {n: e for n, e in errors.items() if e > 1}
    assert max((errors[n] for n in errors.keys() - steps), default=0.0) < 1e-5
    exact, whole = net.float_values[net.float_graph.output], net.output()
    assert float((whole - exact).abs().max() / exact.abs().max()) < 0.12
    assert torch.equal(net.output((2, 2)), whole)
    reasons = {f"{one} has no rule for 8-bit integers" for one in ("elu", "softshrink")}
    assert {*net.graph.kept.values()} == (reasons if name == "mixed" else set())


@pytest.mark.parametrize("name", ["preact_resnet", "amoebanet"])
def test_sums_written_over_an_operand_have_the_same_bits(monkeypatch, name: str):
    net, seen, added = small_quantised(name), [], quantized_kernels.Added

    def spy(*args):
        seen.append(args[2:] == (True,))
        return added(*args)

    monkeypatch.setattr(quantized_kernels, "Added", spy)
    assert torch.equal(net.output_of_stage(), net.output())
    assert any(seen), "no operand is written over"


def test_layers_of_the_largest_numbers_are_within_one_step_of_float64():
    """Weights of -127 and 127 only, images of 0 and 255: where sums of 16 bits would saturate."""
    torch.manual_seed(3)
    net = network("mobile", SIZES["mobile"])
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                module.weight.copy_(module.weight.sign() * module.weight.abs().mean())
    quantised = QuantisedNet(net, (torch.rand(2, 3, *SIZES["mobile"]) < 0.7).float())
    by_name, errors = quantised.graph.by_name, quantised.layer_errors()
    assert max(error for n, error in errors.items() if by_name[n].dtype == "uint8") <= 1
    assert torch.equal(quantised.output((2, 1)), quantised.output())


def test_other_kernels_have_the_same_bits(monkeypatch):
    """Of processors that saturate, and average pools in blocks."""
    net = small_quantised("mobile")
    whole = net.output()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(int8_kernels, "has_exact_sums", lambda largest=0: False)
        assert torch.equal(net.output(), whole)
    net = next(net for net in map(small_quantised, SIZES) if "q_avg_pool2d" in net.kinds)
    whole = net.output()
    monkeypatch.setattr(quantized_kernels, "WHOLE", 0)
    for block in (1, 50, 300):
        monkeypatch.setattr(quantized_kernels, "BLOCK", block)
        assert torch.equal(net.output(), whole)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil", "pads", "divisor"),
    [
        (3, 2, 1, True, False, None),
        ([2, 3], [2, 1], [1, 0], False, True, None),
        (2, None, 0, True, True, 5),
    ],
)
def test_average_pool_is_the_rounded_one_of_real_numbers(
    monkeypatch, kernel, stride, padding, ceil, pads, divisor
):
    monkeypatch.setattr(quantized_kernels, "WHOLE", 0)
    monkeypatch.setattr(quantized_kernels, "BLOCK", 40)
    pool = torch.nn.AvgPool2d(kernel, stride, padding, ceil, pads, divisor)
    x = torch.randint(0, 256, (3, 5, 9, 8), generator=torch.Generator().manual_seed(0))
    expected = pool((x - 77.0).double()) * 0.5 + 12
    args = {"kernel_size": kernel, "stride": stride, "ceil_mode": ceil, "zero_point": 77}
    args |= {"count_include_pad": pads, "divisor_override": divisor, "factor": 0.5}
    args |= {"offset": 12.0, "low": 0, "high": 255}
    sides = zip(pair(stride or kernel), pair(padding), pair(kernel), (9, 8), strict=True)
    axes = [SimpleNamespace(stride=s, padding=p, kernel=k, size_in=n) for s, p, k, n in sides]
    rows, cols = expected.shape[2:]
    window = SimpleNamespace(axes=axes, out=(0, rows, 0, cols), padding=pair(padding))
    window.keep = lambda key, make: make()
    output = quantized_kernels.avg_pool(window, x.to(torch.uint8), args)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert (output - expected.clamp(0, 255)).abs().max() <= 0.5 + 1e-4


def test_weights_of_7_bits_have_the_same_bits_where_sums_of_8_saturate():
    """And on a tile as on all of the image; ``AVX2`` keeps oneDNN from using VNNI."""
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", int7_process.__name__]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == {"exact": [False, True, True, True], "wrong": []}
