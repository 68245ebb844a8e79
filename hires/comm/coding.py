"""Codes tensors of messages as bytes, and back (:mod:`hires.core.codecs`).

Maps travel as NHWC, as :func:`hires.comm.plan_messages.post` sends them. In a rehearsal buffers are
allocated, and nothing is computed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.core.codecs import Codec, codec_named
from hires.core.errors import CommError

usual_codec = functools.cache(codec_named)
"""Returns the codec of a name, one instance of each."""


@torch.no_grad()
def encode(codec: Codec, tensor: Tensor, codes: Tensor | None = None) -> Tensor:
    """Returns the bytes of a tensor; CommError: it holds integers.

    ``codes`` may take them, and be longer.
    """
    if not tensor.is_floating_point():
        raise CommError(f"codecs are for real numbers, not {tensor.dtype}; send it without one")
    if codes is None:
        codes = tensor.new_empty(codec.num_bytes(tensor.numel()), dtype=torch.uint8)
    if not isinstance(codes, FakeTensor):
        codec.encode(_ordered(tensor).reshape(-1), codes[: codec.num_bytes(tensor.numel())])
    return codes


@torch.no_grad()
def decode(codec: Codec, codes: Tensor, tensor: Tensor) -> Tensor:
    """Fills a dense tensor, whose maps are channels-last, and returns it."""
    if not isinstance(codes, FakeTensor):
        codec.decode(codes[: codec.num_bytes(tensor.numel())], _ordered(tensor).view(-1))
    return tensor


def _ordered(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
