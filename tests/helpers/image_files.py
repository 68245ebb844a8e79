"""Writes image files byte by byte: CIFAR-10's records, and PNG with any header."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from hires.data.sources.arrays import CIFAR10_RECORD


def cifar10_folder(folder: Path, train: int = 5, each: int = 4) -> Path:
    """Writes ``train`` files to train with and one to test with, in the format of the authors."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{n + 1}" for n in range(train)), "test_batch"]:
        records = random.integers(0, 256, (each, CIFAR10_RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(each) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def chunk(kind: bytes, data: bytes) -> bytes:
    """Returns a chunk of a PNG."""
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(
    width: int, height: int, bits: int, colour: int, rows: bytes, *chunks: bytes, passes: int = 0
) -> bytes:
    """Returns a PNG that claims a size, whose pixels are some rows with their filters.

    ``passes``: 1 for one that is interlaced.
    """
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, passes)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IEND", b"")])
