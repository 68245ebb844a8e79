"""Measures this machine for predicted step times: ``hires doctor --calibrate``.

It runs small networks of many layers as ranks of a run do, one thread each: one rank alone, all
cores busy, and an image in tiles; it times every node of their passes, and messages between two
ranks. What it finds is kept in the user's cache, by machine and version; nothing is written before
all is measured. With keys of a network (model=unet image=256 batch=8) its own layers are added.

Words describe the layers of a small network:

    c3:64/2   convolution, kernel 3, to 64 channels, stride 2; c3:64g32 in 32 groups
    t2:64     transposed convolution, kernel and stride 2
    save ... add, save ... cat    with the value that was kept
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from hires.bench.bench_main import Result, result_of
from hires.bench.bench_rows import BenchRow, planned
from hires.bench.calibration_times import typical
from hires.bench.start_ranks import run_ranks
from hires.core.config.fields import build
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, PlanError
from hires.core.store import provenance
from hires.plan.search.candidates import FUSED
from hires.plan.simulation.costs import BACK
from hires.plan.simulation.machine_calibration import (
    Calibration,
    Links,
    Overheads,
    Sample,
    keep_calibration,
    load_calibration,
    this_machine,
)
from hires.plan.simulation.node_work import ARITHMETIC

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
SECONDS = 50.0  # for the steps that are timed, at the most
MOST_RANKS = 32  # of all cores busy: so many fill the memory's bandwidth
JOBS = "hires.bench.calibration_times"
log = logging.getLogger(__name__)

Measured = dict[str, Any]
"""What one rank found of one network: samples, and seconds of the parts of its steps."""


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields the calibration once all of it is measured and kept.

    ``task["config"]`` is that of a network whose own layers are measured; None: of the machine
    alone.
    """
    begin_s = time.monotonic()

    def left_s() -> float:
        return max(1.0, float(task["timeout"]) - (time.monotonic() - begin_s))

    cores, kept = min(this_machine().cores, MOST_RANKS), None
    log.info("tracing the networks")
    networks: list[BenchRow] = []
    if task["config"] is not None:
        networks = own_networks(from_dict(task["config"]))
        try:
            kept = load_calibration()
        except ConfigError as error:
            log.warning("%s: all of the machine is measured again", error)
    if kept is None:
        networks += usual_networks(range(len(CHAINS)), min(cores, MOST_TILES))
    measured = _measured(networks, cores, task.get("seconds", SECONDS), left_s)
    if kept is None:
        log.info("measuring messages between two ranks")
        links = Links(*run_ranks(f"{JOBS}:time_links", 2, left_s(), left_s()))
        calibration = calibration_of(measured, links)
    else:
        calibration = with_network(kept, measured)
    path = keep_calibration(calibration)
    where = "nowhere: HIRES_CACHE=off" if path is None else str(path)
    seconds = round(time.monotonic() - begin_s, 1)
    facts = [*speed_facts(calibration), f"kept: {where}, after {seconds:.0f} s"]
    found = {"calibration": calibration.to_dict(), "kept": where, "seconds": seconds}
    yield {**result_of({}, facts), **found}


def _measured(
    networks: list[BenchRow], cores: int, seconds: float, left_s: Callable[[], float]
) -> list[Measured]:
    # What a rank finds of each network: alone, with all cores busy, and in tiles.
    by_ranks = {n: [row for row in networks if row.ranks == n] for n in range(1, MOST_TILES + 1)}
    jobs = [(by_ranks[1], ranks, ranks) for ranks in sorted({1, cores})]
    jobs += [(rows, ranks, cores) for ranks, rows in by_ranks.items() if ranks > 1 and rows]
    measured: list[Measured] = []
    share_s = seconds / max(1, sum(len(rows) for rows, _, _ in jobs))
    for rows, ranks, busy in jobs:
        log.info("measuring operators of %d networks, %d ranks", len(rows), ranks)
        words = [pace_row(), *rows], len(rows) * share_s, busy, left_s()
        measured += run_ranks(f"{JOBS}:time_networks", ranks, left_s(), *words)
    for one in measured:
        one["samples"] = [build(Sample, sample) for sample in one["samples"]]
    return measured


def with_network(kept: Calibration, measured: list[Measured]) -> Calibration:
    """Returns a calibration with the samples of another network; what else is in it stays."""
    new = samples_of(measured, kept.pace_s, kept.busy_pace_s)
    replaced = {(one.work, one.ranks > 1) for one in new}
    others = [one for one in kept.samples if (one.work, one.ranks > 1) not in replaced]
    return replace(kept, network_time=provenance.now(), samples=[*others, *new])


def samples_of(measured: list[Measured], pace_s: float, busy_pace_s: float) -> list[Sample]:
    """Returns all samples as they would be at one pace: seconds of a step that shows it."""
    samples = []
    for one in measured:
        factor = (busy_pace_s if one["ranks"] > 1 else pace_s) / one["pace_step_s"]
        samples += [Sample(w, ranks, factor * seconds) for w, ranks, seconds in one["samples"]]
    return samples


def calibration_of(measured: list[Measured], links: Links) -> Calibration:
    """Returns what follows from the measured networks."""
    alone = [one for one in measured if one["ranks"] == 1]
    busy = [one for one in measured if one["ranks"] > 1] or alone
    paces = [statistics.median(one["pace_step_s"] for one in ones) for ones in (alone, busy)]
    samples = samples_of(measured, *paces)
    rates: dict[str, float] = {}
    for work, _, seconds in samples:
        if work.family in ARITHMETIC:
            flops = work.flops * (BACK if work.back and work.input_grad else 1)
            rates[work.dtype] = max(rates.get(work.dtype, 0.0), flops / seconds)
    updates = [one for one in alone if one["update_s"]]
    overheads = Overheads(
        launch_s=min(sample.seconds for sample in samples),
        pass_s=typical([one["pass_s"] for one in alone]),
        step_s=typical([one["besides_s"] for one in alone]),
        update_bytes_per_s=sum(one["update_bytes"] for one in updates)
        / max(1e-9, sum(one["update_s"] for one in updates)),
    )
    memory = [1 / typical([1 / one["bytes_per_s"] for one in ones]) for ones in (alone, busy)]
    speeds = rates, *memory, links, overheads, *paces
    return Calibration(this_machine(), provenance.now(), samples, *speeds)


def speed_facts(calibration: Calibration) -> list[str]:
    """Returns the speeds of a core, of memory and of links, in lines to show."""
    links, memory = calibration.links, (calibration.bytes_per_s, calibration.busy_bytes_per_s)
    rates = calibration.flops_per_s.items()
    speeds = [f"{dtype} {rate / 1e9:.3g} GFLOP/s" for dtype, rate in rates]
    alone, busy, link, sums = (
        f"{rate / 1e9:.2f} GB/s" for rate in (*memory, links.bytes_per_s, links.reduce_bytes_per_s)
    )
    return [
        f"a core at its best: {', '.join(speeds)}; {len(calibration.samples)} operators timed",
        f"memory: {alone} of a core alone, {busy} of each of all cores",
        f"links between two ranks: {links.latency_s * 1e6:.0f} us, {link}; a small gather "
        f"{links.gather_s * 1e6:.0f} us; sums of gradients {sums}",
    ]


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
