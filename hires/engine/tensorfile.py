"""Writes and reads safetensors files one tensor at a time.

``safetensors.torch.save_file`` wants contiguous tensors, so it would copy all convolution weights,
which lie in channels-last order, and it maps the file into memory, where a full disk is a deadly
signal instead of an error. So the file is written here piece by piece; the library reads it.

    | length of the header | header: JSON, padded to 8 bytes | numbers of tensor 0 | tensor 1 | ...
                             name -> dtype, shape, place; __metadata__: name -> CRC-32

Source:
    https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hires.core.errors import RunError
from hires.core.store.checkpoints import DamagedError

PIECE_BYTES = 2**22
"""A tensor is written in pieces of about this size: all memory that writing adds."""
_NO_SUM = "0" * 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """A safetensors file that is read tensor by tensor.

    Raises:
        DamagedError: it is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self.names: set[str] = set(self._file.keys())
            self._sums: dict[str, str] = self._file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Returns one of the tensors, as it was written; DamagedError: it cannot be read."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{self.path} is damaged: {name}: {error}") from None
        return tensor

    def check(self, names: Iterable[str]) -> None:
        """Compares tensors with the sums that were noted when they were written.

        Raises:
            DamagedError: one of them has changed since.
        """
        for name in sorted(names):
            if _check_sum(self.tensor(name)) != self._sums.get(name):
                raise DamagedError(f"{self.path} is damaged: {name} is not what was written")


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors of any memory order into a new file, which is on the disk when this returns.

    Raises:
        OSError: the file cannot be written.
        RunError: safetensors has no name for a tensor's type.
    """
    # Wide numbers come first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    sums = dict.fromkeys(ordered, _NO_SUM)
    with path.open("xb") as file:
        file.write(_header(ordered, sums))
        for name, tensor in ordered.items():
            sums[name] = _check_sum(tensor, file)
        file.seek(0)
        file.write(_header(ordered, sums))
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Mapping[str, Tensor], sums: Mapping[str, str]) -> bytes:
    # What stands before the numbers. Its length does not depend on the sums, so that it is written
    # twice: first with zeros for them, at the end with the sums of what was written.
    entries: dict[str, Any] = {"__metadata__": dict(sums)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise RunError(f"{name} is of type {tensor.dtype}, which no checkpoint can hold")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_sum(tensor: Tensor, file: IO[bytes] | None = None) -> str:
    total = 0
    for piece in _pieces(tensor):
        if file is not None:
            file.write(piece)
        total = zlib.crc32(piece, total)
    return f"{total:08x}"


def _pieces(tensor: Tensor) -> Iterable[memoryview]:
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row_bytes = rows[0].numel() * rows.element_size()
    for part in torch.split(rows, max(1, PIECE_BYTES // row_bytes)):
        yield part.contiguous().view(-1).view(torch.uint8).numpy().data
