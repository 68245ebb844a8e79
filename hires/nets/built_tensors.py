"""Describes the tensors of a network as it was built, for its identity (core.store.built_network).

A digest is of all bytes. The two sums tell rounding from another network:

    norm     |x|              mixed    sum of x[i] * f[i mod 65536] * (1 + k mod 61), k = i // 65536

Numbers that are exchanged, within a piece or between two, change the mixed sum.
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.store.built_network import BuiltNetwork, BuiltTensor

_PIECE = 2**16


def built_network(tensors: Mapping[str, Tensor], exact: bool = True) -> BuiltNetwork:
    """Returns the description of parameters and buffers by name; without ``exact`` no digests."""
    described = {
        name: _described(tensor, exact) for name, tensor in tensors.items() if _has_numbers(tensor)
    }
    return BuiltNetwork(_machine(), "", described)


def digest_of(tensor: Tensor) -> str:
    """Returns 16 digits of the SHA-256 of a tensor's numbers, in the order of its dims."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()[:16]


def _described(tensor: Tensor, exact: bool) -> BuiltTensor:
    kind = str(tensor.dtype).removeprefix("torch.")
    trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    facts = f"{kind}{list(tensor.shape)}{'' if trains else ' fixed'}"
    mixed, norm = _sums(tensor)
    return BuiltTensor(facts, digest_of(tensor) if exact else "", mixed, norm)


def _has_numbers(tensor: Tensor) -> bool:
    lazy = nn.parameter.is_lazy(tensor)
    return not (lazy or tensor.is_meta) and tensor.layout is torch.strided


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    numbers: Any = flat.numpy()
    return memoryview(numbers)


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    mixed = squares = 0.0
    for number, piece in enumerate(torch.split(flat, _PIECE)):
        wide = piece.double()
        factors = _factors()[: len(wide)]
        mixed += float(wide @ factors) * (1 + number % 61)
        squares += float(wide @ wide)
    finite = math.isfinite(mixed) and math.isfinite(squares)
    return (mixed, math.sqrt(squares)) if finite else (0.0, 0.0)


@functools.cache
def _factors() -> Tensor:
    places = torch.arange(_PIECE, dtype=torch.int64)
    return ((places * 40503) % _PIECE).double() / _PIECE - 0.5


@functools.cache
def _machine() -> str:
    facts = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.__version__)
    return " ".join(facts)
