"""A fused linear layer computes what torch's two operators do, in every type and shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.parallel.fused_linear import FusedLinear
from hires.plan.operators.activations import unfused

ACTIVATIONS = (
    ["relu"], ["silu"], ["gelu", "none"], ["gelu", "tanh"], ["clamp", -0.5, 0.5], ["sigmoid"],
    ["leaky_relu", 0.1], ["hardswish"], ["mish"]
)  # fmt: skip
# In units in the last place of the largest number: the sum of 33 products rounds at most as often.
# In bf16 it is made in fp32; it is rounded, and its activation is rounded again, by half a unit.
ULPS = {torch.float64: 33, torch.float32: 33, torch.bfloat16: 2}

BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Without AVX-512 oneDNN takes no product of bf16."""


def expected(x, weight, bias, activation):
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    name, args = unfused(activation, {"value": "y"})
    return getattr(torch.ops.aten, name)(y, **{k: v for k, v in args.items() if k != "self"})


@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (33,), (2, 3, 33), (2, 2, 3, 33), (0, 33)], ids=str)
@torch.no_grad()
def test_every_activation(dtype, shape):
    x, bias = torch.randn(shape).to(dtype), torch.randn(17).to(dtype)
    weight = nn.Parameter((torch.randn(17, 33) / 6).to(dtype), requires_grad=False)
    for activation in ACTIVATIONS:
        for own in (bias, None):
            exact = expected(x, weight, own, activation)
            plain, packed = FusedLinear(), FusedLinear()
            kept = packed.pack({"weight": weight, "activation": activation})
            by_kernel = dtype == torch.float32 or (dtype == torch.bfloat16 and BF16)
            assert (kept is not None) == (by_kernel and activation != ["mish"])
            for layer in (plain, packed):
                y = layer(x, weight, own, activation)
                assert y.dtype == dtype
                assert y.shape == (*shape[:-1], 17)
                if y.numel():
                    error = (y.double() - exact).abs().max() / exact.abs().max()
                    assert error <= ULPS[dtype] * torch.finfo(dtype).eps, (activation, own is None)


def test_with_gradients_nothing_is_packed():
    weight = nn.Parameter(torch.randn(4, 3))
    layer = FusedLinear()
    assert layer.pack({"weight": weight, "activation": ["relu"]}) is None
    layer(torch.randn(2, 3), weight, None, ["relu"]).sum().backward()
    assert weight.grad is not None
