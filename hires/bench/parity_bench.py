"""Compares many drawn layouts with one process in float64: ``hires bench parity``.

``python -m hires.bench.parity_bench`` draws layouts and networks, runs one step of each on real
ranks in float64 and compares it with the user's plain module in one process. Exit codes: 0 all
equal, 1 some row is not, 2 bad options.

Of many random rows the one is taken that shows the most pairs of values that no row before it has
shown, so that a few dozen rows try every value with nearly every other.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.compared_step import Settings, compare_step, config_from, overrides
from hires.bench.contestants import bench_data
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.engine.verify_bounds import TOLERANCE
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

Choice = dict[str, Any]
"""One value of each key of CHOICES."""
Row = dict[str, Any]

_DATA = bench_data("parity.yaml")
NETWORKS: dict[str, Settings] = _DATA["networks"]
CHOICES: dict[str, list[Any]] = {"network": [*NETWORKS], **_DATA["choices"]}
PIECES = ("replicas", "directions", "pairs", "microbatches")
"""Keys of a layout whose product is the microbatches of a step."""
MAX_RANKS = 12
TRIES = 60
"""Random rows of which the best is taken."""
COLUMNS = (
    *("network", "image", "task", "ranks", "tiles", "stages", "directions", "pairs", "schedule"),
    *("microbatches", "local_dp", "replicas", "fuse", "overlap", "checkpoint"),
)
"""Of the table, beside the error."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParityOptions:
    """The options of ``hires bench parity``."""

    rows: int = option(64, "layouts to draw")
    seed: int = option(0, "decides which", low=0)
    timeout: float = option(300.0, "seconds for one row")


def measure(options: ParityOptions) -> Results:
    """Yields all rows after each new one, and whether they are equal."""
    made: list[Row] = []
    for settings, plan in draw_rows(options.rows, options.seed, _good_plan):
        start = time.monotonic()
        made.append(check(settings, plan, options.timeout))
        log.info(
            "row %d of %d: %s, %d ranks, %.0f s, error %s",
            *(len(made), options.rows, made[-1]["network"], plan.world),
            *(time.monotonic() - start, made[-1]["max_rel_err"]),
        )
        yield {"tolerance": TOLERANCE, "ok": all(row["ok"] for row in made), "rows": made}


def _good_plan(config: RunConfig) -> Plan | None:
    plan = make_plan(config, trace_config(config))
    return plan if plan.ok else None


def draw_rows(
    count: int, seed: int, plan_of: Callable[[RunConfig], Plan | None]
) -> Iterator[tuple[Settings, Plan]]:
    """Yields rows with their plans, each with many pairs of values that those before it lack."""
    chance = random.Random(seed)
    seen: set[tuple[tuple[str, str], ...]] = set()
    number = 0
    while number < count:
        drawn = [draw(chance) for _ in range(TRIES)]
        for choice in sorted(drawn, key=lambda choice: -len(_pairs(choice) - seen)):
            settings = settings_of(choice, number)
            config = config_of(settings)
            plan = None if config is None else plan_of(config)
            if plan is not None:
                seen |= _pairs(choice)
                number += 1
                yield settings, plan
                break


def draw(chance: random.Random) -> Choice:
    """Returns one random choice."""
    choice = {key: chance.choice(values) for key, values in CHOICES.items()}
    if choice["parallel.directions"] == 1:
        choice["parallel.pairs"] = 1
    return choice


def settings_of(choice: Choice, number: int) -> Settings:
    """Returns what makes row ``number`` of a choice."""
    names = ("gpipe", "1f1b") if choice["parallel.directions"] == 1 else ("gems", "gems_1f1b")
    return {
        **{f"model.{key}": value for key, value in NETWORKS[choice["network"]].items()},
        "model.classes": 5,
        "batch": 4 * math.prod(choice[f"parallel.{key}"] for key in PIECES),
        "seed": number,
        "data.classes": 5,
        "data.length": 64,
        **{key: value for key, value in choice.items() if key != "network"},
        "parallel.schedule": names[choice["parallel.schedule"] == "speed"],
    }


def config_of(settings: Settings) -> RunConfig | None:
    """Returns the config of a row; None if its values do not fit, or need too many ranks."""
    try:
        config = config_from(settings)
    except ConfigError:
        return None
    layout = config.parallel
    alone = layout.directions == 2 and layout.num_ranks == layout.replicas
    return None if alone or layout.num_ranks > MAX_RANKS else config


def check(settings: Settings, plan: Plan, timeout_s: float) -> Row:
    """Returns a row: its layout's ranks compare a step with one process."""
    config = config_of(settings)
    assert config is not None
    drawn = {key.rpartition(".")[2]: settings[key] for key in CHOICES if key in settings}
    return {
        "network": config.model.name,
        "task": drawn.pop("name"),
        "ranks": plan.world,
        **drawn,
        "spatial_stages": config.parallel.spatial_stages,
        "verdict": plan.verdict,
        "again": shlex.join(["hires", "verify", *overrides(settings)]),
        **compare_step(config, plan, timeout_s),
    }


def _pairs(choice: Choice) -> set[tuple[tuple[str, str], ...]]:
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
    return {
        **{key: str(row[key]).replace(" ", "") for key in COLUMNS},
        "image": f"{height}x{width}",
        "largest error": f"FAILED: {row['failure']}" if error is None else f"{error:.1e}",
    }


BENCHMARK = Benchmark("parity", __doc__, ParityOptions, measure, _tables, _DATA["note"], _facts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(BENCHMARK.main(sys.argv[1:]))
