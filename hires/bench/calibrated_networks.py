"""Names the networks that a calibration times: those of every machine, and a user's own.

calibration.yaml, or a config  ->  plans on one rank, and of images in tiles  ->  timed
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from hires.bench.contestants import bench_data
from hires.bench.pace import CHAINS, chain_config
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.core.store import provenance
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.search.candidates import FUSED

TILED: list[int] = bench_data("calibration.yaml")["tiled"]
TASKS = ("train", "infer")
MOST_TILES = 4
"""Of an image in tiles."""
OWN_FUSED = 2
"""Lengths of fused halos that are measured of them, the shortest ones."""
OWN_TILED = 2
"""Sizes of microbatches of which a user's network is measured in tiles, the largest ones."""


class Timed(NamedTuple):
    """A network in one precision, task and layout."""

    config: RunConfig
    plan: Plan


class Networks(NamedTuple):
    """What is timed: networks on one rank, and in tiles."""

    whole: list[Timed]
    tiled: list[Timed]


def _dtypes() -> list[str]:
    """Returns the precisions in which this processor has instructions of its own."""
    flags = provenance.cpu_flags()
    return ["fp32", *(["bf16"] if {"avx512_bf16", "amx_bf16"} & flags else [])]


def usual_networks(chosen: Iterable[int], tiles: int) -> Networks:
    """Returns the networks on one rank, in every precision and task, and some in tiles."""
    whole, tiled = [], []
    for index, dtype, task in itertools.product(chosen, _dtypes(), TASKS):
        config = chain_config(CHAINS[index], dtype, task)
        graph = trace_config(config)
        whole.append(planned(config, graph))
        if tiles > 1 and index in TILED and dtype == "fp32":
            cut = dataclasses.replace(config.parallel, tiles=[tiles, 1])
            tiled.append(planned(dataclasses.replace(config, parallel=cut), graph))
    return Networks(whole, tiled)


def own_networks(config: RunConfig) -> Networks:
    """Returns a user's network with microbatches of its batch, its half, and so on, and in tiles.

    It is cut into two to ``MOST_TILES`` tiles, or to as many as there are ``ranks``, if these are
    fewer; of whole batches with fused halos, too. A network that cannot be cut is measured whole.
    ConfigError, PlanError: it makes no plan on one rank.
    """
    measure = dataclasses.replace(config.measure, warmup=0)
    single = dataclasses.replace(
        config,
        device="cpu",
        parallel=ParallelConfig(),
        steps=1,
        measure=measure,
        weights=None,
        ranks=None,
    )
    most = min(config.ranks or MOST_TILES, MOST_TILES)
    grids = [[rows, 1] for rows in range(2, most + 1)] + [[2, 2]] * (most >= 4)
    whole: list[Timed] = []
    tiled: list[Timed] = []
    samples = config.batch
    while samples:
        part = dataclasses.replace(single, batch=samples)
        try:
            graph = trace_config(part)
        except ConfigError:
            if not whole:
                raise
            break  # as batch norms refuse a single sample
        whole.append(planned(part, graph))
        # The search fuses the halos of the best layouts, whose microbatches are large.
        fused = FUSED[: OWN_FUSED if len(whole) == 1 else 1]
        for grid, fuse in itertools.product(grids, fused) if len(whole) <= OWN_TILED else []:
            halo = dataclasses.replace(part.parallel.halo, fuse=fuse)
            cut = dataclasses.replace(part.parallel, tiles=grid, halo=halo)
            with contextlib.suppress(ConfigError, PlanError):
                tiled.append(planned(dataclasses.replace(part, parallel=cut), graph))
        samples //= 2
    return Networks(whole, tiled)


def planned(config: RunConfig, graph: Graph) -> Timed:
    """Returns what is timed of a config; PlanError: its layout is impossible."""
    plan = make_plan(config, graph)
    plan.require_ok()
    return Timed(config, plan)
