"""Maxima by rows are torch's, in every type, for all kernels, strides, borders and dilations."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from hires.parallel.window import max_pool_by_rows


def test_random_pools_have_the_maxima_of_torch():
    drawn, done = random.Random(0), 0
    torch.manual_seed(0)
    while done < 200:
        size = [drawn.randint(1, 5) for _ in "rc"]
        stride, dilation = ([drawn.randint(1, most) for _ in "rc"] for most in (4, 3))
        padding = [drawn.randint(0, k // 2) for k in size]
        ceil_mode = drawn.random() < 0.5
        dtype = drawn.choice([torch.uint8, torch.float64, torch.float32, torch.bfloat16])
        x = torch.randint(0, 256, (2, 3, drawn.randint(1, 17), drawn.randint(1, 17)))
        x = x.to(torch.uint8) if dtype == torch.uint8 else (x - 128).to(dtype)
        if dtype != torch.uint8 and drawn.random() < 0.2:
            x[0, 0, 0, 0] = torch.nan
        if drawn.random() < 0.5:
            x = x.contiguous(memory_format=torch.channels_last)
        before = x.clone()
        try:
            expected = F.max_pool2d(x.double(), size, stride, padding, dilation, ceil_mode)
        except RuntimeError:  # the kernel reaches over the map
            continue
        made = max_pool_by_rows(x, size, stride, padding, dilation, ceil_mode=ceil_mode)
        if dtype == torch.uint8:  # a window that reads no pixel has the number of the border
            expected = expected.clamp(min=0)
        what = f"{dtype} {x.shape} {size} {stride} {padding} {dilation} {ceil_mode}"
        assert made.dtype == dtype
        torch.testing.assert_close(
            made.double(), expected, rtol=0, atol=0, equal_nan=True, msg=what
        )
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
        assert made.data_ptr() != x.data_ptr(), f"{what}: it has the memory of its map"
        done += 1
