"""Computes convolutions and networks with weights of 7 bits, in a process of its own.

oneDNN reads the instructions that it may use, as ``ONEDNN_MAX_CPU_ISA=AVX2``, once in a process.
"""

from __future__ import annotations

import itertools
import json
import sys
from unittest.mock import patch

import torch
from torch import Tensor

from hires.quant import int8_kernels
from hires.quant.int8_kernels import (
    Geometry,
    OnednnProduct,
    Rescale,
    convolve_int8,
    has_exact_sums,
    is_matrix,
)
from tests.helpers.int8_cases import Case, cases
from tests.helpers.quantised_nets import small_quantised

LARGEST = 63
NETWORKS = ("mobile", "efficient", "unet")


def products(case: Case) -> list[Tensor]:
    """Returns what each of oneDNN's kernels makes of a case."""
    products = [case.computed()]
    if is_matrix(case.weight, case.how):
        by_rows = OnednnProduct(case.weight, case.x.shape, case.how, case.border, by_rows=True)
        products.append(by_rows(case.x, case.rescale, case.added))
    return products


def extreme_sums_are_exact() -> bool:
    """Whether sums of the largest integers, of any signs, are those of int64."""
    torch.manual_seed(0)
    one = Rescale(torch.ones(64), torch.zeros(64), dtype=torch.float32, largest=LARGEST)
    for channels, groups, kernel, stride in (
        (512, 1, 3, 1), (64, 64, 3, 1), (128, 4, 5, 2), (3, 1, 7, 2), (1024, 1, 1, 1), (24, 1, 1, 2)
    ):  # fmt: skip
        x = torch.where(torch.rand(2, channels, 9, 8) < 0.9, 255, 0).to(torch.uint8)
        shape = 64, channels // groups, kernel, kernel
        weight = torch.full(shape, LARGEST, dtype=torch.int8)
        weight[1::4] = -LARGEST
        weight[2::4, ::2] = -LARGEST
        signs = torch.rand(weight[3::4].shape) < 0.5
        weight[3::4] = torch.where(signs, LARGEST, -LARGEST).to(torch.int8)
        how = Geometry((stride, stride), (kernel // 2, kernel // 2), groups=groups)
        place = how.stride, how.padding, how.dilation, groups
        sums = torch.conv2d(x.long(), weight.long(), None, *place)
        if not torch.equal(convolve_int8(x, weight, how, one), sums.float()):
            return False
    return True


def strided_pixels_are_exact() -> bool:
    """Whether every second pixel times a matrix is; oneDNN's own kernel fails now and then."""
    for channels, images in itertools.product((4, 8, 17, 24, 40), range(60)):
        x = torch.randint(0, 256, (2, channels, 6, 1 + images % 4), dtype=torch.uint8)
        weight = torch.randint(-LARGEST, LARGEST + 1, (64, channels, 1, 1), dtype=torch.int8)
        one = Rescale(torch.ones(64), torch.zeros(64), dtype=torch.float32, largest=LARGEST)
        made = convolve_int8(x, weight, Geometry((2, 2)), one)
        if not torch.equal(made, torch.conv2d(x.long(), weight.long(), stride=2).float()):
            return False
    return True


def main() -> None:
    """Prints which sums are exact, and what differs in bits from the exact path, or in tiles."""
    every = itertools.chain(cases(150, 3, LARGEST), cases(150, 7, LARGEST))
    wrong = [str(c) for c in every if not all(torch.equal(y, c.expected()) for y in products(c))]
    exact = [has_exact_sums(), has_exact_sums(LARGEST), extreme_sums_are_exact()]
    exact.append(strided_pixels_are_exact())
    for name in NETWORKS:
        net = small_quantised(name, LARGEST)
        outputs = [net.output(), net.output((2, 2))]
        with patch.object(int8_kernels, "has_exact_sums", lambda largest: False):
            by_fp32 = net.output()
        wrong += [] if all(torch.equal(y, by_fp32) for y in outputs) else [name]
    sys.stdout.write(json.dumps({"exact": exact, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main()
