"""Tables of activations: every number is that of float64, what is clamped changes none."""

from __future__ import annotations

import math

import pytest
import torch

from hires.plan.graph import Node
from hires.plan.operators.activations import FUNCTIONS, clamp, function_of, unfused
from hires.plan.passes.int8_arithmetic import inputs_that_count, sum_before, table_of
from hires.quant.affine import affine_of

ACTIVATIONS = [
    *([name] for name in FUNCTIONS if name not in ("leaky_relu", "gelu")),
    ["leaky_relu", 0.1], ["leaky_relu", -0.2], ["gelu", "none"], ["gelu", "tanh"],
]  # fmt: skip
EACH = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
RANGES = [(0.0, 1.0), (-0.28, 6.0), (-1.0, 0.9), (-3.0, 0.0), (0.0, 200.0), (-40.0, 0.01)]


def by_torch(activation, x):
    name, args = unfused(activation, {"value": "x"})
    return getattr(torch.ops.aten, name)(x, **{k: v for k, v in args.items() if k != "self"})


@EACH
def test_functions_are_those_of_torch(activation):
    x = torch.cat([torch.linspace(-30, 30, 2001), torch.tensor([-1e9, -800.0, 800.0, 1e9])])
    made = torch.tensor([function_of(activation)(float(one)) for one in x.double()])
    exact = by_torch(activation, x.double())
    assert torch.allclose(made.double(), exact, rtol=1e-6, atol=1e-7)
    exactly = torch.tensor([function_of(activation)(float(o)) for o in x], dtype=torch.float64)
    assert torch.allclose(exactly, exact, rtol=1e-12, atol=1e-13)


@EACH
def test_a_table_has_the_numbers_of_float64(activation):
    source, to = affine_of(-4.0, 5.0), affine_of(-0.7, 4.2)
    real = (torch.arange(256, dtype=torch.float64) - source.zero_point) * source.scale
    y = by_torch(activation, real) / to.scale
    expected = (y.round() + to.zero_point).clamp(0, 255)
    table = torch.tensor(table_of(activation, source, to), dtype=torch.float64)
    near_half = ((y - y.floor()) - 0.5).abs() < 1e-9
    assert torch.equal(table[~near_half], expected[~near_half])


@EACH
@pytest.mark.parametrize("ends", RANGES, ids=str)
def test_inputs_beyond_the_range_have_the_number_of_its_end(activation, ends):
    to, function = affine_of(*ends), function_of(activation)
    source = inputs_that_count(function, to)
    table = table_of(activation, source, to)
    # An end is a number, up to half a step from where the values stop to change; no slope is above
    # 1.14 (GELU, sqrt(2)).
    most = 1 + 1.14 * source.scale / 2 / to.scale
    for real, number in ((source.real(0), table[0]), (source.real(255), table[255])):
        for times in (1.0, 1.5, 4.0, 100.0, 1e6):
            assert abs(to.quantized(function(times * real)) - number) <= most, (real, times)


def test_the_range_of_inputs_is_no_larger_than_needed():
    source = inputs_that_count(FUNCTIONS["hardswish"], affine_of(-0.375, 6.0))
    assert -3.0 <= source.real(0) < -2.9
    assert 5.9 < source.real(255) < 6.05
    source = inputs_that_count(FUNCTIONS["sigmoid"], affine_of(0.0, 1.0))
    assert 6.0 < source.real(255) < 6.5  # 1 - sigmoid(6.2) is half a step


def test_clamps_need_no_table():
    affine = affine_of(-1.0, 4.0)
    assert sum_before(["relu"], affine) == (affine, {"low": affine.zero_point, "high": 255}, None)
    assert sum_before(None, affine) == (affine, {"low": 0, "high": 255}, None)
    assert sum_before(["silu"], affine).table == ["silu"]
    # An infinite end was rounded to an integer, which is an OverflowError.
    for kind, keys in (("clamp", ("min", "max")), ("hardtanh", ("min_val", "max_val"))):
        for ends, wanted in (((0.0, math.inf), ["relu"]), ((-math.inf, 6.0), None)):
            args = {"self": {"value": "x"}, **dict(zip(keys, ends, strict=True))}
            assert clamp(Node("y", f"{kind}.default", args, [1], "float32")) == wanted
    assert (affine.quantized(-math.inf), affine.quantized(math.inf)) == (0, 255)
