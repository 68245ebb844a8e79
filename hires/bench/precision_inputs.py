"""Makes what rows of inference share: weights with fitting statistics, and scales of int8."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hires.bench.bench_rows import BenchRow, in_float32
from hires.bench.peers.peer_torch import plain_module, whole_batch
from hires.core.config.run_config import RunConfig
from hires.core.errors import LateError, RunError
from hires.core.precisions import INT8
from hires.core.programs import module_command
from hires.core.store import file_names

STATISTICS_PIXELS = 2**22
"""Of images whose statistics are computed at once, unless a batch has more: 4 of 1024x1024."""
REPLACED = ("weights", "results", "quant.images", "quant.calibration")
"""Keys of a calibration that :func:`with_inputs` sets."""


def with_inputs(
    rows: list[BenchRow], words: Sequence[str], folder: Path, timeout_s: float
) -> list[BenchRow]:
    """Returns rows with the weights and scales that are made for them; RunError: that failed.

    ``words`` are the overrides of the first row. A network without weights of its own gets first
    ones whose norms have the statistics of ``settings.statistics`` images, the most of any row, so
    that no value explodes. Rows without such images stay as they are.
    """
    count = max(row.settings.get("statistics", 0) for row in rows)
    if not count:
        return rows
    first = in_float32(rows[0].config)
    weights = first.weights
    if not weights:
        module, images = plain_module(first), calibration_images(first, count)
        at_once = max(first.batch, STATISTICS_PIXELS // (first.height * first.width))
        set_statistics(module, *torch.split(images, at_once))
        weights = str(folder / "weights.safetensors")
        save_file({name: t.contiguous() for name, t in module.state_dict().items()}, weights)
    scales = None
    if any(row.peer == "hires" and row.config.precision.name == INT8 for row in rows):
        scales = str(folder / file_names.SCALES)
        images_used = first.batch * -(-count // first.batch)
        usual = [word for word in words if word.partition("=")[0] not in REPLACED]
        usual += [f"weights={weights}", f"results={folder}", f"quant.images={images_used}"]
        usual += [] if first.data.path else ["quant.calibration=noise"]
        hires_output(["quantize", *usual, "--out", scales], timeout_s)
    filled = []
    for row in rows:
        config = replace(row.config, weights=weights)
        if config.precision.name == INT8:
            config = replace(config, quant=replace(config.quant, scales=scales))
        filled.append(replace(row, config=config, settings={**row.settings, "statistics": count}))
    return filled


def calibration_images(config: RunConfig, count: int) -> Tensor:
    """Returns at least so many images (n, C, H, W), whole batches of them."""
    batch = config.batch * -(-count // config.batch)
    data = replace(config.data, length=max(config.data.length, batch))
    return whole_batch(replace(config, batch=batch, data=data))[0]


@torch.no_grad()
def set_statistics(module: nn.Module, *pieces: Tensor) -> None:
    """Gives every batch norm the mean and variance of all pieces (n, C, H, W), one by one."""
    norms = [norm for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all pieces
    module.train()
    for images in pieces:
        module(images)
    module.eval()


def hires_output(words: Sequence[str], timeout_s: float) -> str:
    """Returns what a command of hires prints; RunError: it failed; LateError: it took too long."""
    what, command = f"`hires {' '.join(words)}`", module_command("hires", *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LateError(f"{what} was not done after {timeout_s:g} s; use --timeout") from None
    if done.returncode:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise RunError(f"{what} failed with code {done.returncode}: {last}")
    return done.stdout
