"""Writes a network as ONNX Runtime and OpenVINO read it, and the images that they calibrate on.

Both hold every value of the network at once while they calibrate, and were killed on a machine of
23 GiB by one image of 1024x1024 pixels. Ranges are single numbers, so those of one image of at most
512x512 pixels serve a network of the same weights for any batch and size.
"""

from __future__ import annotations

import dataclasses
from importlib import util
from pathlib import Path

import torch
from torch import Tensor

from hires.bench.bench_rows import BenchRow, in_float32
from hires.bench.peers.peer_module import plain_module, whole_batch
from hires.bench.precision_inputs import calibration_images
from hires.engine.network_files import write_onnx

CALIBRATED_PIXELS = 512
"""Rows and columns that the libraries calibrate on, at most."""
INSTALL = "pip install 'hires[peers]'"


def missing_packages(*names: str) -> str:
    """Returns what is not installed, and how to install it; nothing: all are here."""
    missing = [name for name in names if util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: {INSTALL}" if missing else ""


def network_file(row: BenchRow) -> tuple[Path, Tensor]:
    """Returns the network of a row for its batch, in fp32, and the images of a step."""
    config = in_float32(row.config)
    path, images = (
        Path(row.settings["folder"]) / "network.onnx",
        whole_batch(config)[0].contiguous(),
    )
    if not path.exists():
        write_onnx(plain_module(config, trick=False).eval(), images, path)
    return path, images


def calibration_samples(row: BenchRow) -> list[Tensor]:
    """Returns the images to calibrate on one by one (1, C, h, w), of large ones the middle."""
    images = calibration_images(in_float32(row.config), row.settings["statistics"])
    rows, columns = (slice(*_middle(size)) for size in images.shape[2:])
    return [image[None] for image in images[:, :, rows, columns].contiguous()]


def sample_file(row: BenchRow, sample: Tensor) -> Path:
    """Returns the network for one such image."""
    path = Path(row.settings["folder"]) / "sample.onnx"
    image = [*sample.shape[2:]]
    config = dataclasses.replace(in_float32(row.config), image=image, batch=1)
    with torch.no_grad():
        write_onnx(plain_module(config, trick=False).eval(), sample, path)
    return path


def _middle(size: int) -> tuple[int, int]:
    kept = min(size, CALIBRATED_PIXELS)
    return (size - kept) // 2, (size - kept) // 2 + kept
