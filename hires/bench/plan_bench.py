"""How large a world can be planned? ``hires bench plan`` plans and proves up to 4096 ranks.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hires.bench import plan_table
from hires.bench.answers import Form, add_output, tell
from hires.bench.contestants import model_config
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import RunConfig, TaskConfig, to_dict
from hires.core.errors import ConfigError, RunError
from hires.nets.trace import trace_config

FORM = Form("plan", plan_table.text, plan_table.readme)

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

log = logging.getLogger(__name__)


@dataclass
class Options:
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
    return tell(FORM, argv, _parser().parse_args, _answer)


def run(options: Options) -> dict[str, list[dict[str, Any]]]:
    """Plans all sizes; returns the rows of both series."""
    base = RunConfig(image=options.image, model=model_config(options.model))
    base = replace(base, batch=1, task=TaskConfig(name="train"))
    graph = trace_config(base).to_dict()
    series = {
        "replicas": [_replicated(ranks) for ranks in options.ranks],
        "one replica": [_tiled(ranks) for ranks in options.replica_ranks],
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, layouts in series.items():
        rows[name] = []
        for layout in layouts:
            batch = layout.replicas * layout.microbatches
            config = replace(base, batch=batch, parallel=layout)
            samples = [_measured(config, graph, options.timeout_s) for _ in range(options.repeats)]
            rows[name].append(_row(layout, samples))
            log.info("%s: %d ranks planned", name, rows[name][-1]["ranks"])
    return rows


def _answer(parsed: argparse.Namespace, command: str) -> dict[str, Any]:
    """Returns all sizes, and what they miss."""
    options = _options(parsed)
    return plan_table.result(command, dataclasses.asdict(options), run(options))


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
    asked = json.dumps({"config": to_dict(config), "graph": graph})
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, check=False, timeout=timeout_s
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


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="hires bench plan", description=__doc__)
    add = parser.add_argument
    add("--model", default=defaults.model, help="network to plan (default: %(default)s)")
    add("--image", type=int, default=defaults.image, help="pixels (default: %(default)s)")
    add("--ranks", default=_listed(defaults.ranks), help="of the world (default: %(default)s)")
    add("--replica-ranks", default=_listed(defaults.replica_ranks), help="default: %(default)s")
    add("--repeats", type=int, default=defaults.repeats, help="processes of every size")
    add("--timeout", type=float, default=defaults.timeout_s, help="seconds for one plan")
    add_output(parser, FORM.name)
    return parser


def _options(parsed: argparse.Namespace) -> Options:
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
    options = Options(parsed.model, parsed.image, ranks, replica_ranks)
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


if __name__ == "__main__":
    sys.exit(main())
