"""Compares many drawn layouts with one process in float64: ``hires bench parity``.

``python -m hires.bench.parity_bench`` draws layouts and networks, runs one step of each on real
ranks in float64, compares it with the user's plain module in one process, and writes a table with
the largest relative error of every row. Exit codes: 0 all equal, 1 some row is not, 2 bad options.

Every row is a random choice of one value for each key. Of many random rows the one is taken that
shows the most pairs of values that no row before it has shown, so that a few dozen rows try every
value with nearly every other.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.contestants import bench_data
from hires.bench.ranks import run_ranks
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError
from hires.core.store import file_names
from hires.core.store.reading import read_json
from hires.engine.build import build_rank
from hires.engine.verify import TOLERANCE, verify_rank
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

Choice = dict[str, Any]
"""One value of each key of CHOICES."""
Row = dict[str, Any]

_DATA = bench_data("parity.yaml")
NETWORKS: dict[str, Choice] = _DATA["networks"]
CHOICES: dict[str, list[Any]] = {"network": [*NETWORKS], **_DATA["choices"]}
MAX_RANKS = 12
TRIES = 60
"""Random rows of which the best is taken."""

LAYOUT_KEYS = ("stages", "directions", "pairs", "microbatches", "local_dp", "replicas")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParityOptions:
    """The options of ``hires bench parity``."""

    rows: int = option(64, "layouts to draw")
    seed: int = option(0, "decides which", low=0)
    timeout: float = option(300.0, "seconds for one row")


def measure(options: ParityOptions) -> Results:
    """Yields all rows after each new one, and whether they are equal."""
    plans: list[Plan] = []

    def accept(config: RunConfig) -> bool:
        plans.append(make_plan(config, trace_config(config)))
        return plans[-1].ok

    made: list[Row] = []
    for settings in draw_rows(options.rows, options.seed, accept):
        start, plan = time.monotonic(), plans[-1]
        made.append(check(settings, plan, options.timeout))
        log.info(
            "row %d of %d: %s, %d ranks, %.0f s, error %s",
            *(len(made), options.rows, made[-1]["network"], plan.world),
            *(time.monotonic() - start, made[-1]["max_rel_err"]),
        )
        yield {"tolerance": TOLERANCE, "ok": all(row["ok"] for row in made), "rows": made}


def draw_rows(
    count: int, seed: int, accept: Callable[[RunConfig], bool]
) -> Iterator[dict[str, Any]]:
    """Yields the settings of rows, each with many pairs of values that those before it lack.

    Args:
        count: how many.
        seed: decides them.
        accept: whether the plan of a row is good; called only for rows that would be taken.
    """
    chance = random.Random(seed)
    seen: set[tuple[tuple[str, str], ...]] = set()
    number = 0
    while number < count:
        drawn = [draw(chance) for _ in range(TRIES)]
        for choice in sorted(drawn, key=lambda choice: -len(_pairs(choice) - seen)):
            settings = settings_of(choice, number)
            config = config_of(settings) if settings else None
            if settings and config and accept(config):
                seen |= _pairs(choice)
                number += 1
                yield settings
                break


def draw(chance: random.Random) -> Choice:
    """Returns one random choice."""
    choice = {key: chance.choice(values) for key, values in CHOICES.items()}
    if choice["directions"] == 1:
        choice["pairs"] = 1
    return choice


def settings_of(choice: Choice, number: int) -> dict[str, Any] | None:
    """Returns the keys and values of a config, or None if the choice needs too many ranks."""
    tiles = choice["tiles"]
    grids = tiles if isinstance(tiles[0], list) else [tiles]
    spatial = len(grids) if grids != [[1, 1]] else 0
    behind = choice["stages"] - spatial
    ranks = sum(rows * cols for rows, cols in grids[:spatial]) + behind * choice["local_dp"]
    both = choice["directions"] == 2
    if behind < 0 or ranks * choice["replicas"] > MAX_RANKS or (both and ranks < 2):
        return None
    names = ("gems", "gems_1f1b") if both else ("gpipe", "1f1b")
    pieces = choice["replicas"] * choice["directions"] * choice["pairs"] * choice["microbatches"]
    return {
        **{f"model.{key}": value for key, value in NETWORKS[choice["network"]].items()},
        "model.classes": 5,
        "image": choice["image"],
        "batch": 4 * pieces,
        "seed": number,
        "data.classes": 5,
        "data.length": 64,
        "task.name": choice["task"],
        "memory.checkpoint": choice["checkpoint"],
        "parallel.tiles": tiles,
        "parallel.schedule": names[choice["schedule"] == "speed"],
        **{f"parallel.{key}": choice[key] for key in LAYOUT_KEYS},
        "parallel.halo.fuse": choice["fuse"],
        "parallel.halo.overlap": choice["overlap"],
    }


def config_of(settings: dict[str, Any]) -> RunConfig | None:
    """Returns the config of a row, or None if its values do not go together."""
    values: dict[str, Any] = {"precision": {"name": "fp64"}, "steps": 3}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    try:
        return from_dict(values)
    except ConfigError:
        return None


def overrides(settings: dict[str, Any]) -> list[str]:
    """Returns the words after ``hires verify`` that make a row again."""
    words = {"task" if key == "task.name" else key: value for key, value in settings.items()}
    return [f"{key}={value}".replace(" ", "") for key, value in words.items()]


def check(settings: dict[str, Any], plan: Plan, timeout_s: float) -> Row:
    """Returns a row: its layout's ranks compare a step with one process."""
    config = config_of(settings)
    assert config is not None
    row: Row = {
        "network": config.model.name,
        "image": list(config.image),
        "task": config.task.name,
        "ranks": plan.world,
        "tiles": config.parallel.tiles,
        "spatial_stages": config.parallel.spatial_stages,
        "schedule": config.parallel.schedule,
        **{key: getattr(config.parallel, key) for key in LAYOUT_KEYS},
        "fuse": config.parallel.halo.fuse,
        "overlap": config.parallel.halo.overlap,
        "checkpoint": config.memory.checkpoint,
        "verdict": plan.verdict,
        "again": shlex.join(["hires", "verify", *overrides(settings)]),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="hires-parity-") as folder:
            answer = run_ranks(verify_one, plan.world, timeout_s, config, plan, Path(folder))
    except HiresError as error:
        return {**row, "max_rel_err": None, "errors": {}, "ok": False, "failure": str(error)}
    return {**row, **answer}


def verify_one(rank: int, config: RunConfig, plan: Plan, folder: Path) -> Row | None:
    """Runs and compares one layout's step; returns the answer on rank 0."""
    verify_rank(build_rank(config, plan, rank, 1), config, folder)
    if rank != 0:
        return None
    return read_json(folder / file_names.VERIFY)


def _pairs(choice: Choice) -> set[tuple[tuple[str, str], ...]]:
    """Returns all pairs of a row's values."""
    return set(itertools.combinations(sorted((key, str(v)) for key, v in choice.items()), 2))


def _facts(result: Result) -> list[str]:
    rows = result["rows"]
    worst = max((row["max_rel_err"] for row in rows if row["max_rel_err"] is not None), default=0)
    equal = sum(row["ok"] for row in rows)
    return [
        f"{equal} of {len(rows)} rows are equal (allowed: {result['tolerance']:.0e}); the largest "
        f"error of all is {worst:.1e}"
    ]


def _tables(result: Result) -> list[BenchTable]:
    return [BenchTable("Every layout against one process", [*map(_cells, result["rows"])])]


def _cells(row: Row) -> dict[str, str]:
    error, (height, width) = row["max_rel_err"], row["image"]
    keys = {"dirs": "directions", "pairs": "pairs", "schedule": "schedule", "mbs": "microbatches"}
    return {
        "network": row["network"],
        "image": f"{height}x{width}",
        "task": row["task"],
        "ranks": str(row["ranks"]),
        "tiles": str(row["tiles"]).replace(" ", ""),
        "stages": str(row["stages"]),
        **{heading: str(row[key]) for heading, key in keys.items()},
        **{key: str(row[key]) for key in ("local_dp", "replicas", "fuse", "overlap", "checkpoint")},
        "largest error": f"FAILED: {row['failure']}" if error is None else f"{error:.1e}",
    }


BENCHMARK = Benchmark("parity", __doc__, ParityOptions, measure, _tables, _DATA["note"], _facts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(BENCHMARK.main())
