"""Writes and reads safetensors files one tensor at a time, alone or as those of a checkpoint.

``safetensors.torch.save_file`` wants contiguous tensors, so it would copy all convolution weights,
which lie in channels-last order, and it maps the file into memory, where a full disk is a deadly
signal instead of an error. So the file is written here piece by piece; the library reads it.

    | length of the header | header: JSON, padded to 8 bytes | numbers of tensor 0 | tensor 1 | ...
                             name -> dtype, shape, place

The SHA-256 of the file is computed as its pieces are written.

Source:
    https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hires.core.errors import RunError
from hires.core.store.checkpoints import Checkpoint, DamagedError, StoredFile, StoredTensor
from hires.engine.device import to_host

PIECE_BYTES = 2**22
"""A tensor is written in pieces of about this size: all memory that writing adds."""
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}


class TensorFile:
    """A safetensors file that is read tensor by tensor; DamagedError: it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self.names: set[str] = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Returns one of the tensors, as it was written; DamagedError: it cannot be read."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{self.path} is damaged: {name}: {error}") from None
        return tensor


def write(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] = MappingProxyType({})
) -> StoredFile:
    """Writes tensors of any memory order into a new file, which is on the disk when this returns.

    ``facts`` are its metadata.

    OSError: the file cannot be written; RunError: safetensors has no name for a tensor's type.
    """
    # Wide numbers come first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in ordered.items():
        if tensor.dtype not in _NAMES:
            raise RunError(f"{name} is of type {tensor.dtype}, which no checkpoint can hold")
        begin, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    found, size = hashlib.sha256(), 0
    head: list[Any] = [len(text).to_bytes(8, "little") + text]
    with path.open("xb") as file:
        for piece in itertools.chain(head, *map(pieces, ordered.values())):
            file.write(piece)
            found.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    shapes = {name: list(tensor.shape) for name, tensor in ordered.items()}
    return StoredFile(size, found.hexdigest(), shapes)


def pieces(tensor: Tensor) -> Iterable[memoryview]:
    """Yields the numbers of a tensor of any memory order, as a file has them."""
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row_bytes = rows[0].numel() * rows.element_size()
    for part in torch.split(rows, max(1, PIECE_BYTES // row_bytes)):
        yield to_host(part).contiguous().view(-1).view(torch.uint8).numpy().data


class ContentsReader:
    """Reads tensors of a checkpoint; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[str, TensorFile] = {}

    def fill(self, tensor: Tensor, parts: list[StoredTensor], first: int = 0) -> None:
        """Fills a tensor, or its rows from ``first`` on; DamagedError: a part cannot be read."""
        if not tensor.dim():
            tensor.copy_(self.tensor(parts[0]))
            return
        last = first + len(tensor)
        for held in parts:
            begin, end = max(first, held.first), min(last, held.first + held.shape[0])
            if begin < end:
                rows = self.tensor(held)[begin - held.first : end - held.first]
                tensor[begin - first : end - first].copy_(rows)

    def tensor(self, held: StoredTensor) -> Tensor:
        """Returns a tensor or rows; DamagedError: they cannot be read."""
        if held.file not in self._opened:
            self._opened[held.file] = TensorFile(self._checkpoint.path / held.file)
        return self._opened[held.file].tensor(held.key)


def stage_file(kind: str, stage: int, part: int | None = None) -> str:
    """Returns the name of the file of one kind of tensors of a stage, or of one holder's rows."""
    return f"{kind}{stage:02d}{'' if part is None else f'.{part:03d}'}.safetensors"
