"""Measures the planning and proof of up to 4096 ranks: ``hires bench plan``.

``python -m hires.bench.plan_bench`` traces the network once and plans each size in a fresh
process, so that peak memory is its own. Exit codes: 0 done, 1 a plan is wrong or an aim was
missed, 2 bad options.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, option
from hires.bench.contestants import model_config
from hires.bench.ranks import run_program
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.task_config import TaskConfig
from hires.core.errors import ConfigError
from hires.core.python_command import module_command
from hires.core.units import MIB, size
from hires.nets.trace import trace_config

AIM_RANKS = 4096
AIMS = {"plan_s": 20.0, "peak_bytes": 1e9, "plan_json_bytes": 50e6}
"""What planning and proving ``AIM_RANKS`` may cost at most."""
AIM_GROWTH = 1.5
"""The cost of a message in the largest world over that in the smallest, at most."""

TITLES = {
    "replicas": "replicas of 64 ranks (three stages of 4x4 tiles, 16 of one rank, 32 microbatches)",
    "one replica": "one replica that grows (four stages of equal square grids, 2 microbatches)",
}
NOTES = """\
Every size is planned and proved in fresh processes: `seconds` and `cpu s` are medians of what
`make_plan` takes, network already traced; `peak MiB` is the largest of the whole processes.
`messages` counts one step of the world, `of one replica` those that were planned and proved, for
equal replicas are proved once; `us each` is processor time over these, `growth` that over the first
row's."""

REPLICAS = ParallelConfig(
    tiles=[4, 4], stages=19, spatial_stages=3, microbatches=32, schedule="1f1b"
)
"""64 ranks: three stages of 16 tiles, and 16 stages of one rank behind them."""

TILES = ParallelConfig(stages=4, spatial_stages=4, microbatches=2, schedule="1f1b")
"""Four stages in tiles, as many as make up the ranks."""

Series = dict[str, list[dict[str, Any]]]
"""The rows of each series of worlds, by its name."""

log = logging.getLogger(__name__)


def whole_replicas(flag: str, text: str) -> tuple[int, ...]:
    """Returns sizes of worlds that whole replicas of ``REPLICAS`` make up."""
    each = REPLICAS.num_ranks
    what = f"a number of replicas of {each} ranks"
    return _sizes(flag, text, what, lambda ranks: max(1, ranks // each) * each)


def squares(flag: str, text: str) -> tuple[int, ...]:
    """Returns sizes of replicas whose stages are square grids."""
    each = TILES.stages
    what = f"{each} times a square"
    return _sizes(flag, text, what, lambda ranks: max(1, math.isqrt(ranks // each)) ** 2 * each)


def _sizes(flag: str, text: str, what: str, nearest: Callable[[int], int]) -> tuple[int, ...]:
    """Returns the numbers of a list, smallest first, if each is a possible size."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{flag} {text} must be numbers with commas between, as 64,256")
    sizes = tuple(sorted({int(part) for part in parts}))
    for ranks in sizes:
        if nearest(ranks) != ranks:
            raise ConfigError(f"{flag} {ranks} is not {what}; use {nearest(ranks)}")
    return sizes


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``hires bench plan``."""

    model: str = option("resnet101", "network to plan")
    image: int = option(2048, "pixels")
    ranks: tuple[int, ...] = option(
        "64,256,1024,4096", "of worlds of replicas", parse=whole_replicas
    )
    replica_ranks: tuple[int, ...] = option("16,64,256,1024", "of the one replica", parse=squares)
    repeats: int = option(3, "processes of every size")
    timeout: float = option(600.0, "seconds for one plan")


def measure(options: PlanOptions) -> Results:
    """Plans all sizes; yields the rows of both series after each new one."""
    base = RunConfig(image=options.image, model=model_config(options.model))
    base = replace(base, batch=1, task=TaskConfig(name="train"))
    graph = trace_config(base).to_dict()
    grids = [math.isqrt(ranks // TILES.stages) for ranks in options.replica_ranks]
    series = {
        "replicas": [replace(REPLICAS, replicas=n // REPLICAS.num_ranks) for n in options.ranks],
        "one replica": [replace(TILES, tiles=[side, side]) for side in grids],
    }
    rows: Series = {name: [] for name in series}
    plan_one = module_command("hires.bench.plan_size")
    for name, layouts in series.items():
        for layout in layouts:
            batch = layout.replicas * layout.microbatches
            config = replace(base, batch=batch, parallel=layout)
            request = json.dumps({"config": to_dict(config), "graph": graph})
            samples = [
                json.loads(run_program("planning", plan_one, options.timeout, request))
                for _ in range(options.repeats)
            ]
            rows[name].append(_row(layout, samples))
            log.info("%s: %d ranks planned", name, rows[name][-1]["ranks"])
            yield judged(dataclasses.asdict(options), rows)


def judged(options: dict[str, Any], series: Series) -> Result:
    """Returns the result: numbers, aims, and which rows miss them."""
    for rows in series.values():
        for row in rows:
            row["growth"] = row["us_per_message"] / rows[0]["us_per_message"]
            missed = ["verdict"] if row["errors"] else []
            if row["ranks"] <= AIM_RANKS:
                missed += [key for key, most in AIMS.items() if row[key] > most]
            row["missed"] = missed + ["growth"] * (row["growth"] > AIM_GROWTH)
    return {
        "ok": not any(row["missed"] for rows in series.values() for row in rows),
        "aims": {"ranks": AIM_RANKS, **AIMS, "growth": AIM_GROWTH},
        "options": options,
        "series": series,
    }


def _row(layout: ParallelConfig, samples: list[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    planned_once = first["messages"] / layout.replicas
    middle = {key: statistics.median(s[key] for s in samples) for key in ("plan_s", "cpu_s")}
    return {
        **first,
        **middle,
        "layout": dataclasses.asdict(layout),
        "replicas": layout.replicas,
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "planned_messages": planned_once,
        "us_per_message": middle["cpu_s"] / planned_once * 1e6,
        "samples_s": [sample["plan_s"] for sample in samples],
    }


def _tables(result: Result) -> list[BenchTable]:
    series = result["series"].items()
    return [BenchTable(TITLES[name], [*map(_cells, rows)]) for name, rows in series]


def _facts(result: Result) -> list[str]:
    """Returns what was to be reached, whether it was, and what was not measured."""
    aims, options, series = result["aims"], result["options"], result["series"].values()
    sizes = [row["ranks"] for rows in series for row in rows if row["ranks"] <= aims["ranks"]]
    largest = max(sizes, default=0)
    costs = f"{aims['plan_s']:g} s, {aims['peak_bytes'] / 1e9:g} GB of memory"
    costs += f", plan.json of {aims['plan_json_bytes'] / 1e6:g} MB"
    growth = f"cost of a message at most {aims['growth']:g} times that in the smallest world"
    grows = any(len(rows) > 1 for rows in series)  # one world by itself cannot show it
    left = [f"worlds of {largest + 1} to {aims['ranks']} ranks"] * (largest < aims["ranks"])
    reached = ", ".join([costs] * bool(sizes) + [growth] * grows)
    missing = ", ".join(left + [growth] * (not grows))
    parts = [f"{reached}: {'reached' if result['ok'] else 'MISSED'}"] if reached else []
    parts += [f"not measured: {missing}"] if missing else []
    return [
        f"aims{f' up to {largest} ranks' if sizes else ''}: {'; '.join(parts)}",
        f"network: {options['model']}, {options['image']} pixels, training",
    ]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "ranks": str(row["ranks"]),
        "replicas": str(row["replicas"]),
        "seconds": f"{row['plan_s']:.2f}",
        "cpu s": f"{row['cpu_s']:.2f}",
        "peak MiB": f"{row['peak_bytes'] / MIB:.0f}",
        "messages": str(row["messages"]),
        "of one replica": f"{row['planned_messages']:.0f}",
        "us each": f"{row['us_per_message']:.1f}",
        "growth": f"{row['growth']:.2f}",
        "plan.json": size(row["plan_json_bytes"]),
        "verdict": f"MISSED {', '.join(row['missed'])}" if row["missed"] else "ok",
    }


BENCHMARK = Benchmark("plan", __doc__, PlanOptions, measure, _tables, NOTES, _facts)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
