"""Makes what all rows of a case share: weights, images, fp32 outputs and scales for 8 bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hires.bench.onnx_files import CALIBRATION, IMAGES
from hires.bench.precision_cases import PrecisionCase, PrecisionOptions
from hires.bench.ranks import run_program
from hires.bench.runners import plain_module, whole_batch
from hires.core.precisions import INT8
from hires.core.python_command import module_command
from hires.core.store import file_names

EXPECTED = "expected.npy"
"""Outputs of the plain network in fp32, in the folder of a case."""
STATISTICS_PIXELS = 2**22
"""Of images whose statistics are computed at once, unless a batch has more: 4 of 1024x1024."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the rows of a case share."""

    folder: Path
    weights: str
    scales: str
    """Empty without a precision of 8 bits."""


def make_inputs(case: PrecisionCase, folder: Path, options: PrecisionOptions) -> Inputs:
    """Fills the folder of a case; RunError: the calibration failed."""
    weights = str(Path(options.weights).absolute()) if options.weights else ""
    config = case.config("fp32", {}, weights, "")
    images, _ = whole_batch(config)
    np.save(folder / IMAGES, images.contiguous().numpy())
    module = plain_module(config)
    if not weights:
        most = max(case.batch, STATISTICS_PIXELS // case.image**2)
        set_statistics(module, *torch.split(_calibrated(case, options), most))
        weights = str(folder / "weights.safetensors")
        tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        save_file(tensors, weights)
    with torch.inference_mode():
        np.save(folder / EXPECTED, module(images).float().numpy())
    scales = ""
    if INT8 in options.precisions:
        np.save(folder / CALIBRATION, _calibrated(case, options).contiguous().numpy())
        scales = str(folder / file_names.SCALES)
        words = calibration_words(case, options.calibration)
        words += [f"weights={weights}", f"results={folder}", f"out={scales}"]
        command = module_command("hires", "quantize", *words)
        run_program("the calibration", command, options.timeout)
    return Inputs(folder, weights, scales)


def _calibrated(case: PrecisionCase, options: PrecisionOptions) -> Tensor:
    # Those that 8 bits are calibrated on, (n, C, H, W); with --data none of them is measured.
    images, _ = whole_batch(case.calibration(options.calibration))
    return images


@torch.no_grad()
def set_statistics(module: nn.Module, *pieces: Tensor) -> None:
    """Gives every batch norm the mean and variance of images, so that no value explodes.

    ``pieces`` of them, each (n, C, H, W), pass one by one; norms get the mean over all pieces.
    """
    norms = [one for one in module.modules() if isinstance(one, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all pieces
    module.train()
    for images in pieces:
        module(images)
    module.eval()
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum


def accuracy(outputs: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> Mapping[str, float]:
    """Returns the share of classes that agree with fp32, and the signal over the error in dB.

    Both have the shape (n, classes) or (n, classes, H, W).
    """
    agreed = float((outputs.argmax(1) == expected.argmax(1)).mean())
    wide = expected.astype(np.float64)
    noise = float(np.square(outputs.astype(np.float64) - wide).sum())
    signal = float(np.square(wide).sum())
    ratio = 10 * np.log10(signal / max(noise, 1e-30 * signal))
    return {"agreement": agreed, "signal_db": float(ratio)}


def calibration_words(case: PrecisionCase, least: int) -> list[str]:
    """Returns what makes ``hires quantize`` calibrate on the images of ``case.calibration``."""
    words = [f"model.{key}={json.dumps(value)}" for key, value in _network(case).items()]
    words += [f"image={case.image}", f"batch={case.batch}", "task=infer", "device=cpu"]
    words += [f"quant.images={case.num_calibrated(least)}"]
    words += [f"data.{key}={json.dumps(value)}" for key, value in case.source().items()]
    return words if case.data else [*words, "quant.calibration=noise"]


def _network(case: PrecisionCase) -> dict[str, Any]:
    """Returns the values of ``model`` that differ from their defaults."""
    default = dataclasses.asdict(type(case.config("fp32", {}, "", "").model)())
    return {key: value for key, value in case.network().items() if default[key] != value}
