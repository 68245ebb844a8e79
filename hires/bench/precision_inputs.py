"""Makes what rows of inference share: weights with fitting statistics, and scales of int8."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hires.bench.bench_rows import BenchRow, in_float32
from hires.bench.peers.peer_module import plain_module, whole_batch
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import LateError, RunError
from hires.core.precisions import INT8
from hires.core.python_command import module_command
from hires.core.store import file_names

STATISTICS_PIXELS = 2**22
"""Of images whose statistics are computed at once, unless a batch has more: 4 of 1024x1024."""


def with_inputs(rows: list[BenchRow], folder: Path, timeout_s: float) -> list[BenchRow]:
    """Returns rows with the weights and scales that are made for them; RunError: that failed.

    A network without weights of its own gets first ones whose norms have the statistics of
    ``settings.statistics`` images, so that no value explodes.
    """
    first = in_float32(rows[0].config)
    count, weights = rows[0].settings["statistics"], first.weights
    if not weights:
        module, images = plain_module(first), calibration_images(first, count)
        set_statistics(
            module, *torch.split(images, max(first.batch, STATISTICS_PIXELS // first.height**2))
        )
        weights = str(folder / "weights.safetensors")
        save_file({name: t.contiguous() for name, t in module.state_dict().items()}, weights)
    scales = ""
    if any(row.peer == "hires" and row.config.precision.name == INT8 for row in rows):
        scales = str(folder / file_names.SCALES)
        hires_output(_quantize(first, count, weights, folder, scales), timeout_s)
    made = []
    for row in rows:
        config = replace(row.config, weights=weights)
        if config.precision.name == INT8:
            config = replace(config, quant=replace(config.quant, scales=scales or None))
        made.append(replace(row, config=config))
    return made


def calibration_images(config: RunConfig, count: int) -> Tensor:
    """Returns at least so many images (n, C, H, W), whole batches of them."""
    batch = config.batch * -(-count // config.batch)
    data = replace(config.data, length=max(config.data.length, batch))
    return whole_batch(replace(config, batch=batch, data=data))[0]


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


def hires_output(words: Sequence[str], timeout_s: float) -> str:
    """Returns what a command of hires prints; RunError: it failed; LateError: it took too long."""
    what = f"`hires {' '.join(words)}`"
    try:
        done = subprocess.run(
            module_command("hires", *words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LateError(f"{what} was not done after {timeout_s:g} s; use --timeout") from None
    if done.returncode:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise RunError(f"{what} failed with code {done.returncode}: {last}")
    return done.stdout


def _quantize(config: RunConfig, count: int, weights: str, folder: Path, scales: str) -> list[str]:
    """Returns the words that calibrate a config's network on the images of its rows."""
    usual: dict[str, Any] = asdict(ModelConfig())
    model = {key: value for key, value in asdict(config.model).items() if usual[key] != value}
    words = [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
    words += [f"image={json.dumps(config.image)}", f"batch={config.batch}", "task=infer"]
    images = config.batch * -(-count // config.batch)
    words += ["device=cpu", f"quant.images={images}", f"seed={config.seed}"]
    names = ("name", "path", "split", "classes") if config.data.path else ("name", "classes")
    given = {name: getattr(config.data, name) for name in names}
    words += [
        f"data.{key}={json.dumps(value)}" for key, value in given.items() if value is not None
    ]
    words += [] if config.data.path else ["quant.calibration=noise"]
    return ["quantize", *words, f"weights={weights}", f"results={folder}", f"out={scales}"]
