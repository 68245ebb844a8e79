"""The networks that a calibration times: chains of layers that words describe, and a user's own.

c3:64/2   convolution, kernel 3, to 64 channels, stride 2; c3:64g32 in 32 groups
t2:64     transposed convolution, kernel and stride 2
save ... add, save ... cat    with the value that was kept
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import resources
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from hires.bench.bench_rows import BenchRow, planned
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, PlanError
from hires.core.store import provenance
from hires.plan.search.candidates import FUSED

_DATA = yaml.safe_load((resources.files(__package__) / "rows/calibration.yaml").read_text("utf-8"))
CHAINS: list[dict[str, Any]] = _DATA["chains"]
TILED: list[int] = _DATA["tiled"]
PACE = 2  # the chain that shows the pace: its maps are larger than caches, and its kernels usual
MOST_TILES = 4  # of an image in tiles
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

    def __init__(self, words: str, classes: int) -> None:
        super().__init__()
        self.words, self.layers = words.split(), nn.ModuleDict()
        channels, saved = 3, 0
        for index, word in enumerate(self.words):
            if shape := _SHAPE.fullmatch(word):
                kernel, out, stride, groups = (int(n or 1) for n in shape.groups()[1:])
                self.layers[str(index)] = (
                    nn.ConvTranspose2d(channels, out, kernel, kernel)
                    if shape[1] == "t"
                    else nn.Conv2d(
                        channels, out, kernel, stride, kernel // 2, groups=groups, bias=False
                    )
                )
                channels = out
            elif word == "bn":
                self.layers[str(index)] = nn.BatchNorm2d(channels)
            elif word == "gn":
                self.layers[str(index)] = nn.GroupNorm(min(8, channels), channels)
            saved = channels if word == "save" else saved
            channels += saved if word == "cat" else 0
            channels //= 4 if word == "shuffle" else 1
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, classes)."""
        kept = x
        for index, word in enumerate(self.words):
            if word == "save":
                kept = x
            elif word == "add":
                x = x + kept
            elif word == "cat":
                x = torch.cat([kept, x], 1)
            else:
                x = self.layers[str(index)](x) if word not in _FUNCTIONS else _FUNCTIONS[word](x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def usual_networks(chosen: Iterable[int], tiles: int) -> list[BenchRow]:
    """Returns the networks on one rank, in every precision and task, and some in tiles."""
    fast = {"avx512_bf16", "amx_bf16"} & provenance.cpu_flags()
    types, networks = ["fp32", *["bf16"] * bool(fast)], list[BenchRow]()
    for index, dtype, task in itertools.product(chosen, types, ("train", "infer")):
        config = chain_config(CHAINS[index], dtype, task)
        networks.append(row_with_plan(config))
        if tiles > 1 and index in TILED and dtype == "fp32":
            networks.append(row_with_plan(config, tiles=[tiles, 1]))
    return networks


def own_networks(config: RunConfig) -> list[BenchRow]:
    """Returns a user's network with microbatches of its batch, its half, and so on, and in tiles.

    It is cut into two to ``MOST_TILES`` tiles, or to as many as there are ``ranks``, if these are
    fewer; of whole batches with fused halos, too. A network that cannot be cut is measured whole.
    ConfigError, PlanError: it makes no plan on one rank.
    """
    measure = replace(config.measure, warmup=0)
    single = replace(config, steps=1, measure=measure, device="cpu", parallel=ParallelConfig())
    single = replace(single, weights=None, ranks=None)
    most = min(config.ranks or MOST_TILES, MOST_TILES)
    grids = [[rows, 1] for rows in range(2, most + 1)] + [[2, 2]] * (most >= 4)
    whole, tiled, samples = list[BenchRow](), list[BenchRow](), config.batch
    while samples:
        part = replace(single, batch=samples)
        try:
            whole.append(row_with_plan(part))
        except ConfigError:
            if not whole:
                raise
            break  # as batch norms refuse a single sample
        # The search fuses the halos of the best layouts, whose microbatches are large.
        first = len(whole) == 1
        cuts = itertools.product(grids, FUSED[: OWN_FUSED if first else 1])
        for grid, fuse in cuts if len(whole) <= OWN_TILED else ():
            halo = replace(part.parallel.halo, fuse=fuse)
            with contextlib.suppress(ConfigError, PlanError):
                tiled.append(row_with_plan(part, tiles=grid, halo=halo))
        samples //= 2
    return whole + tiled


def row_with_plan(config: RunConfig, **parallel: Any) -> BenchRow:
    """Returns what is timed of a config; PlanError: its layout is impossible."""
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return planned(BenchRow("timed", config))


def chain_config(chain: dict[str, Any], dtype: str, task: str) -> RunConfig:
    """Returns the config of a network of the calibration on one rank."""
    words = {"words": chain["words"], "classes": 10}
    values = {"device": "cpu", "image": [chain["image"]] * 2, "batch": chain["batch"], "steps": 1}
    values |= {"task": {"name": task}, "precision": {"name": dtype}, "optimizer": {"lr": 0.0}}
    values |= {"data": {"classes": 10, "prefetch": 0}, "measure": {"warmup": 0}}
    model = {"name": "custom", "target": f"{__name__}:Chain", "args": words, "classes": 10}
    return from_dict({**values, "model": model})


def pace_row() -> BenchRow:
    """Returns the network whose steps show how fast the machine is; each rank runs them alone."""
    return BenchRow("pace", chain_config(CHAINS[PACE], "fp32", "train"))
