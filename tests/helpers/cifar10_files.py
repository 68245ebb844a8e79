"""Writes files in CIFAR-10's binary version, with pixels that mean nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hires.data.small_images import CIFAR10_RECORD


def cifar10_folder(folder: Path, train: int = 5, each: int = 4) -> Path:
    """Writes ``train`` files to train with and one to test with, in the format of the authors."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{n + 1}" for n in range(train)), "test_batch"]:
        records = random.integers(0, 256, (each, CIFAR10_RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(each) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder
