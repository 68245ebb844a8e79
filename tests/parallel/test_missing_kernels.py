"""Are operators computed for which torch has no kernel of 16 bits?"""

from __future__ import annotations

import pytest
import torch

from hires.parallel.missing_kernels import with_kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operator_without_a_kernel_is_computed_in_float32(dtype):
    torch.manual_seed(0)
    x = torch.rand(1, 2, 9, 7).to(dtype).requires_grad_()
    scale = with_kernel(torch.ops.aten._upsample_bicubic2d_aa.default)
    for _ in range(2):  # the first call finds out
        found = scale(x, [4, 3], False)
        assert found.dtype == dtype
    exact = torch.ops.aten._upsample_bicubic2d_aa.default(x.detach().double(), [4, 3], False)
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=2**-8)
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_other_failures_stay_failures():
    with pytest.raises(RuntimeError, match="shape"):
        with_kernel(torch.ops.aten.mm.default)(torch.ones(2, 3).half(), torch.ones(2, 3).half())
