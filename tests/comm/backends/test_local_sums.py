"""Sums of terms that one rank has: in order, halves rounded once, refused without a meaning."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hires.comm.backends.local_sums import reduce_in_order

Op = dist.ReduceOp


def test_halves_are_rounded_once():
    # 2048 + 1 + 1 in fp16: rounded after each addition it would stay 2048.
    terms = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    reduce_in_order(terms, Op.SUM, terms[1])
    assert terms[1].item() == 2050
    assert terms[0].item() == 2048  # a term stays as it was, also where there are three


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.complex64, Op.MAX), (torch.float32, Op.BAND), (torch.float32, Op.AVG)]
)
def test_reduction_that_a_type_lacks_is_refused(dtype: torch.dtype, op: object):
    one = torch.ones(1, dtype=dtype)
    with pytest.raises(ValueError, match="has no reduction"):
        reduce_in_order([one, one], op, one.clone())
