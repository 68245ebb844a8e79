"""Evaluations, predictions and calibrations for tests, and what plain torch computes of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hires.cli.data_keys import resolve_data
from hires.core.config.run_config import RunConfig
from hires.core.evaluation_summary import IMAGES, PIXELS
from hires.data.opening import open_data
from hires.engine.build import whole_model
from hires.engine.evaluation_intervals import mean_interval, overlap_intervals
from tests.helpers.layouts import config_of
from tests.helpers.reference import structural_similarity

EVALUATE = {"task": {"name": "evaluate"}, "batch": 4, "data": {"length": 11, "classes": 4}}
CALIBRATE: dict[str, Any] = {
    "task": {"name": "calibrate"},
    "batch": 4,
    "steps": 3,
    "measure": {"warmup": 0},
    "data": {"length": 16, "classes": 4},
    "quant": {"images": 10, "observer": "entropy"},
}
UNET = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [20, 16]}
EDSR = {"model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2}, "image": [12, 10]}
"""Images of 24 x 20, so that windows of SSIM reach over several tiles."""
GEMS = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}


def evaluation(**keys: Any) -> RunConfig:
    return resolve_data(config_of(**{**EVALUATE, **keys}))


def prediction(**keys: Any) -> RunConfig:
    predict = {"task": {"name": "predict"}, "predict": {"reduce": "probability"}}
    return evaluation(**{**predict, **keys})


def calibration(**keys: Any) -> RunConfig:
    merged = {**CALIBRATE, **keys, "quant": {**CALIBRATE["quant"], **keys.get("quant", {})}}
    return config_of(**merged)


def plain(config: RunConfig) -> tuple[list[Tensor], list[Any]]:
    """Returns what plain torch computes, image by image: outputs and targets."""
    model, source = whole_model(config), open_data(config)
    rows, cols = (0, config.height), (0, config.width)
    outputs, targets = [], []
    with torch.no_grad():
        for i in range(len(source)):
            image = torch.from_numpy(source.window(i, rows, cols))[None].double()
            outputs.append(model(image)[0])
            rect = config.target_rect
            targets.append(
                source.label(i) if rect is None else source.target(i, rect[:2], rect[2:])
            )
    return outputs, targets


def expected(config: RunConfig, kind: str) -> dict[str, Any]:
    """Returns the summary of an evaluation by plain torch, in one process."""
    outputs, targets = plain(config)
    if kind == IMAGES:
        pairs = [(o, torch.from_numpy(t).double()) for o, t in zip(outputs, targets, strict=True)]
        errors = [float((o.clamp(-2, 2) - t).square().mean()) for o, t in pairs]
        ratios = [10 * math.log10(16 / error) for error in errors]
        losses = [float((o - t).abs().mean()) for o, t in pairs]
        mean, interval = sum(ratios) / len(ratios), mean_interval(ratios)
        scaled = [[(one.clamp(-2, 2).numpy() + 2) / 4 for one in pair] for pair in pairs]
        similar = [structural_similarity(*pair) for pair in scaled]
        found = {"psnr": mean, "psnr_ci95": interval, "loss": sum(losses) / len(losses)}
        return found | {"ssim": sum(similar) / 11, "ssim_ci95": mean_interval(similar)}
    counts, by_image = Counter[tuple[int, int]](), Counter[tuple[int, int, int]]()
    losses, size = [], 0
    for image, (output, target) in enumerate(zip(outputs, targets, strict=True)):
        labels = torch.full(output.shape[1:], target)
        losses.append(float(functional.cross_entropy(output[None], labels[None], reduction="sum")))
        for made in output.argmax(0).flatten().tolist():
            counts[target, made] += 1
            by_image[image, target, made] += 1
            size += 1
    confusion = [[counts[t, p] for p in range(4)] for t in range(4)]
    right = sum(confusion[t][t] for t in range(4))
    found = {"top1": right / size, "loss": sum(losses) / size, "confusion": confusion}
    return found | (overlap_intervals(by_image, len(outputs), 4) if kind == PIXELS else {})
