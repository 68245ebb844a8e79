"""The networks that a calibration times: chains of layers that words describe, and a user's own.

c3:64/2   convolution, kernel 3, to 64 channels, stride 2; c3:64g32 in 32 groups
t2:64     transposed convolution, kernel and stride 2
save ... add, save ... cat    with the value that was kept
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from hires.bench.bench_rows import BenchRow, planned
from hires.bench.peers.peer_module import ModuleSteps, plain_module
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, PlanError
from hires.core.store import provenance
from hires.engine.device import RankDevice
from hires.plan.search.candidates import FUSED

_DATA = yaml.safe_load((resources.files(__package__) / "rows/calibration.yaml").read_text("utf-8"))
CHAINS: list[dict[str, Any]] = _DATA["chains"]
TILED: list[int] = _DATA["tiled"]
PACE = 2
"""The chain that shows the pace: its maps are larger than caches, and its kernels usual."""
TASKS = ("train", "infer")
MOST_TILES = 4
"""Of an image in tiles."""
OWN_FUSED, OWN_TILED = 2, 2
"""Of a user's network in tiles: lengths of fused halos, and sizes of microbatches."""
_SHAPE = re.compile(r"([ct])(\d+):(\d+)(?:/(\d+))?(?:g(\d+))?")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "swish": F.silu,
    "smooth": F.gelu,
    "gate": torch.sigmoid,
    "soft": lambda x: F.softmax(x, 1),
    "max2": lambda x: F.max_pool2d(x, 2),
    "max3": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "border": lambda x: F.pad(x, (1, 1, 1, 1)),
}


class Chain(nn.Module):
    """Layers one after the other, then the mean of the image and a classifier."""

    def __init__(self, words: str, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.words, self.layers = words.split(), nn.ModuleList()
        saved, self.places = 0, list[int]()
        for word in self.words:
            layer, before = _layer(word, channels), channels
            self.places.append(len(self.layers) if layer is not None else -1)
            self.layers.extend([] if layer is None else [layer])
            shape = _SHAPE.fullmatch(word)
            channels = int(shape[3]) if shape else channels
            saved = channels if word == "save" else saved
            channels += saved if word == "cat" else 0
            channels = before // 4 if word == "shuffle" else channels
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        kept = x
        for word, place in zip(self.words, self.places, strict=True):
            if word == "save":
                kept = x
            elif word == "add":
                x = x + kept
            elif word == "cat":
                x = torch.cat([kept, x], 1)
            else:
                x = self.layers[place](x) if place >= 0 else _FUNCTIONS[word](x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _layer(word: str, channels: int) -> nn.Module | None:
    """Returns the layer of a word; None: it has no parameters."""
    if shape := _SHAPE.fullmatch(word):
        kernel, out = int(shape[2]), int(shape[3])
        stride, groups = int(shape[4] or 1), int(shape[5] or 1)
        if shape[1] == "t":
            return nn.ConvTranspose2d(channels, out, kernel, kernel)
        return nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    if word == "bn":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(min(8, channels), channels) if word == "gn" else None


class Networks(NamedTuple):
    """What is timed: networks on one rank, and in tiles."""

    whole: list[BenchRow]
    tiled: list[BenchRow]


def usual_networks(chosen: Iterable[int], tiles: int) -> Networks:
    """Returns the networks on one rank, in every precision and task, and some in tiles."""
    fast = {"avx512_bf16", "amx_bf16"} & provenance.cpu_flags()
    whole, tiled = [], []
    for index, dtype, task in itertools.product(chosen, ["fp32", *["bf16"] * bool(fast)], TASKS):
        config = chain_config(CHAINS[index], dtype, task)
        whole.append(row_with_plan(config))
        if tiles > 1 and index in TILED and dtype == "fp32":
            cut = dataclasses.replace(config.parallel, tiles=[tiles, 1])
            tiled.append(row_with_plan(dataclasses.replace(config, parallel=cut)))
    return Networks(whole, tiled)


def own_networks(config: RunConfig) -> Networks:
    """Returns a user's network with microbatches of its batch, its half, and so on, and in tiles.

    It is cut into two to ``MOST_TILES`` tiles, or to as many as there are ``ranks``, if these are
    fewer; of whole batches with fused halos, too. A network that cannot be cut is measured whole.
    ConfigError, PlanError: it makes no plan on one rank.
    """
    single = dataclasses.replace(
        config,
        device="cpu",
        parallel=ParallelConfig(),
        steps=1,
        measure=dataclasses.replace(config.measure, warmup=0),
        weights=None,
        ranks=None,
    )
    most = min(config.ranks or MOST_TILES, MOST_TILES)
    grids = [[rows, 1] for rows in range(2, most + 1)] + [[2, 2]] * (most >= 4)
    whole: list[BenchRow] = []
    tiled: list[BenchRow] = []
    samples = config.batch
    while samples:
        part = dataclasses.replace(single, batch=samples)
        try:
            whole.append(row_with_plan(part))
        except ConfigError:
            if not whole:
                raise
            break  # as batch norms refuse a single sample
        # The search fuses the halos of the best layouts, whose microbatches are large.
        fused = FUSED[: OWN_FUSED if len(whole) == 1 else 1]
        for grid, fuse in itertools.product(grids, fused) if len(whole) <= OWN_TILED else []:
            halo = dataclasses.replace(part.parallel.halo, fuse=fuse)
            cut = dataclasses.replace(part.parallel, tiles=grid, halo=halo)
            with contextlib.suppress(ConfigError, PlanError):
                tiled.append(row_with_plan(dataclasses.replace(part, parallel=cut)))
        samples //= 2
    return Networks(whole, tiled)


def row_with_plan(config: RunConfig) -> BenchRow:
    """Returns what is timed of a config; PlanError: its layout is impossible."""
    return planned(BenchRow("timed", config))


def chain_config(chain: dict[str, Any], dtype: str, task: str) -> RunConfig:
    """Returns the config of a network of the calibration on one rank."""
    target = f"{__name__}:Chain"
    words = {"words": chain["words"], "classes": 10}
    return from_dict(
        {
            "device": "cpu",
            "image": [chain["image"]] * 2,
            "batch": chain["batch"],
            "steps": 1,
            "model": {"name": "custom", "target": target, "args": words, "classes": 10},
            "data": {"classes": 10, "prefetch": 0},
            "task": {"name": task},
            "precision": {"name": dtype},
            "optimizer": {"lr": 0.0},
            "measure": {"warmup": 0},
        }
    )


def pace_steps() -> ModuleSteps:
    """Returns the steps that show how fast the machine is at a moment; a rank runs them alone."""
    config = chain_config(CHAINS[PACE], "fp32", "train")
    return ModuleSteps(plain_module(config), BenchRow("pace", config), 0, RankDevice())


class Pace:
    """Times these steps by the clock of this thread."""

    def __init__(self) -> None:
        self.steps = pace_steps()
        self.steps.step()  # prepares kernels

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        begin_s = time.thread_time()
        self.steps.step()
        taken_s = time.thread_time() - begin_s
        self.steps.after_step()
        return taken_s
