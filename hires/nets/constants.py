"""Stores constants of a network, tensors that are neither parameters nor buffers, in its graph."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from hires.nets.traced_memory import name_of
from hires.plan.graph import Parameter


def constant_of(tensor: Tensor) -> Parameter:
    """Returns a constant with its numbers, which :func:`constant_tensor` gives back."""
    flat = tensor.detach().contiguous().view(-1)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    shape, dtype = list(tensor.shape), name_of(tensor.dtype)
    return Parameter(shape, dtype, False, base64.b64encode(data).decode())


def constant_tensor(fact: Parameter) -> Tensor:
    """Returns the tensor of a constant."""
    assert fact.data is not None
    data = bytearray(base64.b64decode(fact.data))
    dtype = getattr(torch, fact.dtype)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(fact.shape)
