"""Is a packed convolution with ``padding="same"`` that of torch, whatever the map's shape?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hires.parallel import torch_faults
from hires.parallel.fused_convolution import FusedConvolution
from hires.parallel.torch_faults import convolve


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kernel", [(4, 2), (2, 3), (3, 4), (3, 3)])
@pytest.mark.parametrize("adds", [False, True])
def test_packed_convolution_pads_each_map_once(kernel, adds):
    # Of an odd total, the packed shape has a row or column more: a map of that shape came unpadded.
    rows, cols = 9, 12
    weight = nn.Parameter(torch.randn(8, 8, *kernel))
    args = {
        "weight": weight,
        "bias": torch.randn(8),
        "stride": [1, 1],
        "padding": "same",
        "dilation": [1, 1],
        "groups": 1,
    }
    with torch.no_grad():
        fused = FusedConvolution()
        assert fused.pack((2, 8, rows, cols), args, torch.float32) is not None
        for more in ((0, 0), tuple((size + 1) % 2 for size in kernel)):
            x = torch.randn(2, 8, rows + more[0], cols + more[1])
            values = {"x": x, "y": torch.randn_like(x)} if adds else {"x": x}
            expected = F.conv2d(x, weight, args["bias"], padding="same")
            expected = expected + values["y"] if adds else expected
            computed = fused(x, **args, other=values.get("y"))
            torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


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
        fused = FusedConvolution()
        assert fused.pack((2, 8, 9, 7), {**args, "groups": groups}, torch.bfloat16) is None
        with Seen():
            made = fused(x, weight, None, 1, pads, 1, groups, None, ["relu"])
        exact = F.conv2d(x.float(), weight.float(), padding=pads, groups=groups)
    assert made.dtype == torch.bfloat16
    assert seen == [torch.float32]
    torch.testing.assert_close(made, exact.bfloat16().relu(), rtol=2**-7, atol=2**-7)
    wide = x.clone().requires_grad_()
    convolve(wide, weight, None, 1, pads, 1, groups).float().sum().backward()
    plain = x.float().requires_grad_()
    F.conv2d(plain, weight.detach().float(), padding=pads, groups=groups).sum().backward()
    assert torch.equal(wide.grad, plain.grad.bfloat16())
