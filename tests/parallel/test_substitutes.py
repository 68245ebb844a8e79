"""Have norms of whole maps the gradients that torch's own lack on a CPU?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hires.parallel.substitutes import SUBSTITUTES


def defined(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    parts = x.reshape(len(x), groups, -1)
    means, variances = parts.mean(2, keepdim=True), parts.var(2, unbiased=False, keepdim=True)
    y = ((parts - means) * (variances + 1e-5).rsqrt()).view(x.shape)
    return y * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize(
    ("kind", "needs"), [("group_norm", True), ("instance_norm", True), ("instance_norm", False)]
)
def test_gradients_are_those_of_the_definition(kind, needs):
    torch.manual_seed(2)
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_(needs)
    weight, bias = (torch.randn(6, dtype=torch.float64).requires_grad_() for _ in range(2))
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    if kind == "group_norm":
        made = SUBSTITUTES["group_norm"](x, 3, weight, bias)
    else:
        args = mean, var, True, 0.3, 1e-5, False
        made = SUBSTITUTES["instance_norm"](x, weight, bias, *args)
    expected = defined(x, weight, bias, 3 if kind == "group_norm" else 6)
    assert torch.allclose(made, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(made)  # channels-last, as the next layer's
    leaves = [weight, bias, *([x] if needs else [])]
    found, wanted = (torch.autograd.grad(y, leaves, grad) for y in (made, expected))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)
    if kind == "instance_norm":  # moved, by the mean over the samples
        pixels = x.detach().flatten(2)
        assert torch.allclose(mean, 0.3 * pixels.mean((0, 2)))
        assert torch.allclose(var, 0.7 + 0.3 * pixels.var(2).mean(0))
