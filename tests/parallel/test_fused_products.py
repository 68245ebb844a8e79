"""Products with what follows them compute what torch's operators do."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hires.nets.trace import trace
from hires.parallel import torch_faults
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.fused_products import convolve_fused, fused_linear, pack_weight
from hires.parallel.torch_faults import convolve
from hires.plan.graph import INPUT
from hires.plan.operators.formulas import unfused
from hires.plan.plan import Plan
from hires.quant.int8_kernels import Geometry
from tests.helpers.simulated_tiles import laid_out

LINEAR = fused_linear(None, None)
ACTIVATIONS = (
    ["relu"], ["silu"], ["gelu", "none"], ["gelu", "tanh"], ["clamp", -0.5, 0.5], ["sigmoid"],
    ["leaky_relu", 0.1], ["hardswish"], ["mish"]
)  # fmt: skip
# In units in the last place of the largest number: the sum of 33 products rounds at most as often.
# In bf16 it is made in fp32; it is rounded, and its activation is rounded again, by half a unit.
ULPS = {torch.float64: 33, torch.float32: 33, torch.bfloat16: 2}


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def expected(x, weight, bias, activation):
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    name, args = unfused(activation, {"value": "y"})
    return getattr(torch.ops.aten, name)(y, **{k: v for k, v in args.items() if k != "self"})


@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (33,), (2, 3, 33), (2, 2, 3, 33), (0, 33)], ids=str)
@torch.no_grad()
def test_every_activation(dtype, shape):
    x, bias = torch.randn(shape).to(dtype), torch.randn(17).to(dtype)
    weight = (torch.randn(17, 33) / 6).to(dtype)
    for activation, own in itertools.product(ACTIVATIONS, (bias, None)):
        exact = expected(x, weight, own, activation)
        y = LINEAR({"input": x, "weight": weight, "bias": own, "activation": activation})
        assert y.dtype == dtype
        assert y.shape == (*shape[:-1], 17)
        if y.numel():
            error = (y.double() - exact).abs().max() / exact.abs().max()
            assert error <= ULPS[dtype] * torch.finfo(dtype).eps, (activation, own is None)


def test_with_gradients_torchs_own_operators_compute():
    weight, x = nn.Parameter(torch.randn(4, 3)), torch.randn(2, 3)
    args = {"input": x, "weight": weight, "bias": None, "activation": ["relu"]}
    LINEAR(args).sum().backward()
    assert weight.grad is not None


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kernel", [(4, 2), (2, 3), (3, 4), (3, 3)])
def test_convolution_of_a_whole_map_pads_it_once(kernel):
    net, x = nn.Conv2d(8, 8, kernel, padding="same"), torch.randn(2, 8, 9, 12)
    graph = trace(net, [*x.shape], False, torch.float32)
    graph, stage = laid_out(graph, (1, 1))
    plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]])
    context = Context(plan, 0, collections.defaultdict(lambda: None), None)
    run = compile_node(graph.nodes[0], context, dict(net.named_parameters()))
    with torch.no_grad():
        torch.testing.assert_close(run({INPUT: x}), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("other", ["", "float32", "bfloat16"])
@torch.no_grad()
def test_a_packed_weight_computes_what_its_own_order_does(dtype, groups, other):
    x, weight = torch.randn(2, 16, 9, 7).to(dtype), torch.randn(32, 16 // groups, 3, 3) / 8
    args = {"weight": weight.to(dtype), "bias": torch.randn(32).to(dtype), "groups": groups}
    args |= {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 1], "activation": ["relu"]}
    args["other"] = torch.randn(2, 32, 5, 5).to(getattr(torch, other)) if other else None
    packed = pack_weight(x, args)
    if dtype == torch.bfloat16 and not torch_faults.onednn_has_bf16():
        assert packed is None
        return
    assert packed.is_mkldnn
    rounding = torch.finfo(torch.bfloat16 if other == "bfloat16" else dtype).eps
    for rows in (9, 5):  # it serves inputs of other sizes, too
        part, given = x[:, :, :rows], dict(args)
        if other:
            given["other"] = args["other"][:, :, : (rows + 1) // 2]
        exact = convolve_fused(part.double(), {key: _double(v) for key, v in given.items()})
        made = convolve_fused(part, {**given, "weight": packed}).double()
        torch.testing.assert_close(made, exact, rtol=0, atol=4 * rounding * exact.max().item())


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("kernel", [1, 3])
def test_bf16_without_a_kernel_of_onednn_is_computed_in_fp32(monkeypatch, kernel, groups):
    # Without AVX-512 `run task=infer precision=bf16` ended in "bf16 path needs the cpu support".
    monkeypatch.setattr(torch_faults, "onednn_has_bf16", lambda: False)
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "convolution" in str(function):
                seen.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 8, 9, 7).bfloat16()
    weight = nn.Parameter((torch.randn(16, 8 // groups, kernel, kernel) / 4).bfloat16())
    pads = [kernel // 2] * 2
    args = {"weight": weight, "bias": None, "stride": [1, 1], "padding": pads, "dilation": [1, 1]}
    with torch.no_grad():
        how = Geometry(padding=pads, groups=groups)
        args |= {"groups": groups, "activation": ["relu"]}
        with Seen():
            made = convolve_fused(x, args)
        exact = F.conv2d(x.float(), weight.float(), padding=pads, groups=groups)
    assert made.dtype == torch.bfloat16
    assert seen == [torch.float32]
    torch.testing.assert_close(made, exact.bfloat16().relu(), rtol=2**-7, atol=2**-7)
    wide = x.clone().requires_grad_()
    convolve(wide, weight, None, how).float().sum().backward()
    plain = x.float().requires_grad_()
    F.conv2d(plain, weight.detach().float(), padding=pads, groups=groups).sum().backward()
    assert torch.equal(wide.grad, plain.grad.bfloat16())
