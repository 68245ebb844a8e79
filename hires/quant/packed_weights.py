"""Packs 8-bit weights into 4 bits and unpacks them: integers of -7 to 7 times the step of a group.

    8 bits    channel of n integers           -91  13   52 ...  |  6  -2 ...      groups of 64
    steps     one for each group               13               |  1
    4 bits    integer = 8 bits / step          -7   1    4 ...  |  6  -2 ...      -7 to 7
    stored    (K, bytes) of uint8             [two integers a byte, each 8 above | steps]

Steps are integers of 1 to 18, so unpacked weights are again 8-bit integers with the scale
of their channel: kernels, and their exact sums, are those of 8 bits. A group takes the step with
the least squared error, which may clip its largest weights. All is computed in integers, so that
every processor packs alike.

Source:
    Lin et al., "QServe: W4A8KV4 quantization and system co-design", 2024, progressive group
    quantisation; here symmetric.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.quant.affine import GROUP, packed_bytes

MOST = 7
"""The largest 4-bit integer; -8 would make the range uneven."""
LARGEST_STEP = 18
"""7 * 18 is the most that 8 bits hold."""
_MIDDLE = 8
_PIECE = 4096  # groups that are packed at once: their integers stay in a core's cache


def pack(numbers: Tensor) -> Tensor:
    """Returns int8 weights of -127 to 127, (K, ...), in 4 bits: uint8, (K, packed_bytes)."""
    flat = numbers.reshape(len(numbers), -1)
    groups = _grouped(flat)
    pieces = [_packed_groups(piece) for piece in torch.split(groups.view(-1, GROUP), _PIECE)]
    coarse, steps = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    coarse, steps = coarse.view(len(flat), -1)[:, : flat.shape[1]], steps.view(len(flat), -1)
    coarse = F.pad(coarse + _MIDDLE, (0, flat.shape[1] % 2), value=_MIDDLE).to(torch.uint8)
    return torch.cat((coarse[:, ::2] | coarse[:, 1::2] << 4, steps), 1)


def unpack(packed: Tensor, shape: list[int]) -> Tensor:
    """Returns the int8 weights of a ``shape`` (K, ...) that :func:`pack` has packed, rounded.

    It looks at no number (:func:`require_packed` does), so tensors without numbers have a result,
    too. ValueError: the bytes are too many or too few.
    """
    count = math.prod(shape[1:])
    coarse, steps = _parts(packed, shape)
    numbers: Tensor = _grouped(coarse[:, :count]) * steps[..., None].to(torch.int8)
    return numbers.flatten(1)[:, :count].reshape(shape)


def require_packed(packed: Tensor, shape: list[int]) -> None:
    """Refuses bytes that :func:`pack` makes of no weights of a ``shape`` (K, ...): ValueError."""
    coarse, steps = _parts(packed, shape)
    if bool((coarse < -MOST).any()) or bool(coarse[:, math.prod(shape[1:]) :].any()):
        raise ValueError("a 4-bit weight lies outside -7 to 7")
    if bool((steps < 1).any()) or bool((steps > LARGEST_STEP).any()):
        raise ValueError(f"a step of 4-bit weights lies outside 1 to {LARGEST_STEP}")


def _parts(packed: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    # (K, bytes) -> 4-bit integers (int8, an even number a channel) and steps (uint8)
    count = math.prod(shape[1:])
    if packed.dtype != torch.uint8 or list(packed.shape) != [shape[0], packed_bytes(count)]:
        raise ValueError(f"{packed.dtype} {list(packed.shape)} are no weights of {shape} in 4 bits")
    halves, steps = packed[:, : -(-count // 2)], packed[:, -(-count // 2) :]
    coarse = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1).to(torch.int8) - _MIDDLE
    return coarse, steps


def _grouped(flat: Tensor) -> Tensor:
    # (K, n) -> (K, groups, GROUP), the last group filled with zeros
    return F.pad(flat, (0, -flat.shape[1] % GROUP)).view(len(flat), -1, GROUP)


def _packed_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    # (n, GROUP) -> 4-bit integers (int8) and the step of each group (uint8)
    groups = groups.float()  # which holds all squares and their sums exactly
    steps = groups.new_ones((len(groups), 1))
    least = torch.full_like(steps, torch.inf)
    for step in range(1, LARGEST_STEP + 1):
        error = _divided(groups, step).mul_(-step).add_(groups).square_().sum(1, keepdim=True)
        steps[error < least] = step
        least = torch.minimum(least, error)
    return _divided(groups, steps).to(torch.int8), steps.to(torch.uint8)


def _divided(groups: Tensor, step: Tensor | int) -> Tensor:
    return (groups / step).round_().clamp_(-MOST, MOST)
