"""Measures the planning and proof of up to 4096 ranks: ``hires bench plan``.

``python -m hires.bench.plan_bench`` traces the network once and plans each size in a fresh
process, so that peak memory is its own. Exit codes: 0 done, 1 a plan is wrong or an aim was
missed, 2 bad options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hires.bench.bench_output import (
    BenchTable,
    Form,
    Progress,
    Result,
    add_output,
    origin,
    run_benchmark,
)
from hires.bench.contestants import model_config
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, TaskConfig, to_dict
from hires.core.errors import ConfigError, RunError
from hires.core.units import MIB, size
from hires.nets.trace import trace_config

AIM_RANKS = 4096
AIMS = {"plan_s": 20.0, "peak_bytes": 1e9, "plan_json_bytes": 50e6}
"""What planning and proving ``AIM_RANKS`` may cost at most."""
AIM_GROWTH = 1.5
"""The cost of a message in the largest world over that in the smallest, at most."""

HEADINGS = (
    "ranks", "replicas", "seconds", "cpu s", "peak MiB", "messages", "of one replica",
    "us each", "growth", "plan.json", "verdict",
)  # fmt: skip
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
    name="sp+pp",
    tiles=[4, 4],
    stages=19,
    spatial_stages=3,
    microbatches=32,
    schedule="1f1b",
)
"""64 ranks: three stages of 16 tiles, and 16 stages of one rank behind them."""

TILES = ParallelConfig(name="sp+pp", stages=4, spatial_stages=4, microbatches=2, schedule="1f1b")
"""Four stages in tiles, as many as make up the ranks."""

Series = dict[str, list[dict[str, Any]]]
"""The rows of each series of worlds, by its name."""

log = logging.getLogger(__name__)


@dataclass
class PlanOptions:
    """What is planned."""

    model: str = "resnet101"
    image: int = 2048
    ranks: tuple[int, ...] = (64, 256, 1024, 4096)
    """Worlds of replicas of 64 ranks."""
    replica_ranks: tuple[int, ...] = (16, 64, 256, 1024)
    """Sizes of the one replica of the other series: four times a square."""
    repeats: int = 3
    timeout_s: float = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return run_benchmark(FORM, argv, _parser().parse_args, _measure)


def run(options: PlanOptions, on_row: Callable[[Series], None] = lambda series: None) -> Series:
    """Plans all sizes; returns the rows of both series.

    Args:
        options: what is planned.
        on_row: called with all rows so far after each new one.
    """
    base = RunConfig(image=options.image, model=model_config(options.model))
    base = replace(base, batch=1, task=TaskConfig(name="train"))
    graph = trace_config(base).to_dict()
    series = {
        "replicas": [_replicated(ranks) for ranks in options.ranks],
        "one replica": [_tiled(ranks) for ranks in options.replica_ranks],
    }
    rows: Series = {}
    for name, layouts in series.items():
        rows[name] = []
        for layout in layouts:
            batch = layout.replicas * layout.microbatches
            config = replace(base, batch=batch, parallel=layout)
            samples = [_measured(config, graph, options.timeout_s) for _ in range(options.repeats)]
            rows[name].append(_row(layout, samples))
            log.info("%s: %d ranks planned", name, rows[name][-1]["ranks"])
            on_row(rows)
    return rows


def result(command: str, options: dict[str, Any], series: Series) -> Result:
    """Returns everything that is kept: numbers, aims, and where they come from."""
    for rows in series.values():
        for row in rows:
            row["growth"] = row["us_per_message"] / rows[0]["us_per_message"]
            row["missed"] = _missed(row)
    ok = not any(row["missed"] for rows in series.values() for row in rows)
    return {
        **origin(command, ok=ok, aims={"ranks": AIM_RANKS, **AIMS, "growth": AIM_GROWTH}),
        "options": options,
        "series": series,
    }


def _measure(parsed: argparse.Namespace, command: str, progress: Progress) -> Result:
    """Returns all sizes, and what they miss."""
    options = _options(parsed)

    def kept(series: Series) -> Result:
        return result(command, dataclasses.asdict(options), series)

    return kept(run(options, lambda series: progress.update(kept(series))))


def _replicated(ranks: int) -> ParallelConfig:
    """Returns as many replicas as make up a world."""
    return replace(REPLICAS, replicas=ranks // REPLICAS.num_ranks)


def _tiled(ranks: int) -> ParallelConfig:
    """Returns one replica of square grids."""
    side = math.isqrt(ranks // TILES.stages)
    return replace(TILES, tiles=[side, side])


def _measured(config: RunConfig, graph: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Plans in a fresh process.

    Raises:
        RunError: the process failed or took too long.
    """
    command = [sys.executable, "-m", "hires.bench.plan_size"]
    request = json.dumps({"config": to_dict(config), "graph": graph})
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"a plan took longer than --timeout {timeout_s:g} s") from error
    if done.returncode:
        raise RunError(f"planning failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _row(layout: ParallelConfig, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one size: medians of times, the largest of memory."""
    first = samples[0]
    planned_once = first["messages"] / layout.replicas
    plan_s = statistics.median(sample["plan_s"] for sample in samples)
    cpu_s = statistics.median(sample["cpu_s"] for sample in samples)
    return {
        **first,
        "layout": dataclasses.asdict(layout),
        "replicas": layout.replicas,
        "plan_s": plan_s,
        "cpu_s": cpu_s,
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "planned_messages": planned_once,
        "us_per_message": cpu_s / planned_once * 1e6,
        "samples_s": [sample["plan_s"] for sample in samples],
    }


def _missed(row: dict[str, Any]) -> list[str]:
    """Returns the aims that a row misses: its verdict, its time or its memory."""
    missed = ["verdict"] if row["errors"] else []
    if row["ranks"] <= AIM_RANKS:
        missed += [key for key, most in AIMS.items() if row[key] > most]
    if row["growth"] > AIM_GROWTH:
        missed.append("growth")
    return missed


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    defaults = PlanOptions()
    parser = argparse.ArgumentParser(prog="hires bench plan", description=__doc__)
    add = parser.add_argument
    add("--model", default=defaults.model, help="network to plan (default: %(default)s)")
    add("--image", type=int, default=defaults.image, help="pixels (default: %(default)s)")
    add("--ranks", default=_listed(defaults.ranks), help="of the world (default: %(default)s)")
    add("--replica-ranks", default=_listed(defaults.replica_ranks), help="default: %(default)s")
    add("--repeats", type=int, default=defaults.repeats, help="processes of every size")
    add("--timeout", type=float, default=defaults.timeout_s, help="seconds for one plan")
    add_output(parser, "plan")
    return parser


def _options(parsed: argparse.Namespace) -> PlanOptions:
    """Returns the checked options.

    Raises:
        ConfigError: one of them makes no sense.
    """
    if parsed.repeats < 1 or parsed.timeout <= 0 or parsed.image < 1:
        raise ConfigError("--repeats and --image must be at least 1, and --timeout above 0")
    model_config(parsed.model)
    ranks, per_replica = _numbers("--ranks", parsed.ranks), REPLICAS.num_ranks
    for number in ranks:
        if number % per_replica:
            low = max(1, number // per_replica) * per_replica
            raise ConfigError(
                f"--ranks {number} is not a number of replicas of {per_replica} ranks; use {low}"
            )
    replica_ranks = _numbers("--replica-ranks", parsed.replica_ranks)
    for number in replica_ranks:
        side = max(1, math.isqrt(number // TILES.stages))
        if side * side * TILES.stages != number:
            raise ConfigError(
                f"--replica-ranks {number} is not {TILES.stages} times a square; "
                f"use {TILES.stages * side * side}"
            )
    options = PlanOptions(parsed.model, parsed.image, ranks, replica_ranks)
    return replace(options, repeats=parsed.repeats, timeout_s=parsed.timeout)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Returns the numbers of a list, smallest first."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} {text} must be numbers with commas between, as 64,256")
    return tuple(sorted({int(part) for part in parts}))


def _listed(numbers: Sequence[int]) -> str:
    """Returns numbers as one would type them."""
    return ",".join(map(str, numbers))


def _facts(found: Result) -> list[str]:
    options = found["options"]
    network = f"network: {options['model']}, {options['image']} pixels, training"
    return [_aims(found), network]


def _tables(found: Result) -> list[BenchTable]:
    align = "r" * len(HEADINGS)
    return [
        BenchTable(TITLES[name], HEADINGS, [*map(_cells, rows)], align)
        for name, rows in found["series"].items()
    ]


def _aims(found: dict[str, Any]) -> str:
    """Returns what was to be reached, whether it was, and what was not measured."""
    aims, series = found["aims"], found["series"].values()
    sizes = [row["ranks"] for rows in series for row in rows if row["ranks"] <= aims["ranks"]]
    largest = max(sizes, default=0)
    costs = [
        f"{aims['plan_s']:g} s",
        f"{aims['peak_bytes'] / 1e9:g} GB of memory",
        f"plan.json of {aims['plan_json_bytes'] / 1e6:g} MB",
    ]
    growth = [f"cost of a message at most {aims['growth']:g} times that in the smallest world"]
    grows = any(len(rows) > 1 for rows in series)  # one world by itself cannot show it
    judged = (costs if sizes else []) + (growth if grows else [])
    left = [f"worlds of {largest + 1} to {aims['ranks']} ranks"] * (largest < aims["ranks"])
    left += [] if grows else growth
    parts = [f"{', '.join(judged)}: {'reached' if found['ok'] else 'MISSED'}"] if judged else []
    parts += [f"not measured: {', '.join(left)}"] if left else []
    return f"aims{f' up to {largest} ranks' if sizes else ''}: {'; '.join(parts)}"


def _cells(row: dict[str, Any]) -> list[str]:
    """Returns a row as text."""
    return [
        str(row["ranks"]),
        str(row["replicas"]),
        f"{row['plan_s']:.2f}",
        f"{row['cpu_s']:.2f}",
        f"{row['peak_bytes'] / MIB:.0f}",
        str(row["messages"]),
        f"{row['planned_messages']:.0f}",
        f"{row['us_per_message']:.1f}",
        f"{row['growth']:.2f}",
        size(row["plan_json_bytes"]),
        f"MISSED {', '.join(row['missed'])}" if row["missed"] else "ok",
    ]


FORM = Form("plan", _tables, NOTES, _facts)


if __name__ == "__main__":
    sys.exit(main())
