"""Maxima of unsigned 8-bit maps are torch's, for all kernels, strides, borders and dilations."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from hires.quant.number_pools import max_pool_int8


def test_random_pools_have_the_maxima_of_torch():
    drawn, done = random.Random(0), 0
    torch.manual_seed(0)
    while done < 400:
        size = [drawn.randint(1, 5) for _ in "rc"]
        stride, dilation = ([drawn.randint(1, most) for _ in "rc"] for most in (4, 3))
        padding = [drawn.randint(0, k // 2) for k in size]
        ceil_mode = drawn.random() < 0.5
        x = torch.randint(0, 256, (2, 3, drawn.randint(1, 17), drawn.randint(1, 17)))
        x = x.to(torch.uint8)
        if drawn.random() < 0.5:
            x = x.contiguous(memory_format=torch.channels_last)
        before = x.clone()
        try:
            expected = F.max_pool2d(x.float(), size, stride, padding, dilation, ceil_mode)
        except RuntimeError:  # the kernel reaches over the map
            continue
        made = max_pool_int8(x, size, stride, padding, dilation, ceil_mode=ceil_mode)
        # A window that reads no pixel has the number of the border.
        assert torch.equal(made.float(), expected.clamp(min=0)), (size, stride, padding, dilation)
        assert torch.equal(x, before), "the map was overwritten"
        done += 1
