"""``hires sweep``: plans many runs from one command, then runs them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.choices import groups
from hires.cli.options import (
    AFTER,
    JSON,
    Parser,
    composing,
    flag,
    option,
    positive,
    sweep_overrides,
)
from hires.cli.planning import FORECASTS_S, Planner
from hires.cli.screens.screen import print_config
from hires.cli.sweep.axes import grid_of
from hires.cli.sweep.configs import Composer
from hires.cli.sweep.execution import Sweep, refuse_costly, run_sweep
from hires.cli.sweep.experiment import Stored, taken_out
from hires.cli.sweep.submission import check_launcher
from hires.cli.sweep.sweep_points import ORDERS, Points, compose_all, plan_all
from hires.cli.sweep.sweep_progress import PlanningProgress
from hires.cli.sweep.sweep_tables import as_json, print_points
from hires.cli.sweep.where import Where
from hires.core.errors import ConfigError, PlanError
from hires.core.store.campaign import locked
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn


def _hours(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of hours above 0")
    return value


PARSER = Parser(
    "sweep",
    "Run every combination of several values of some keys.",
    (
        "hires sweep parallel=sp,sp+gems precision=fp32,bf16 image=512,1024",
        "hires sweep image=256,512,1024 batch=16,8,2 --zip image,batch      pairs, no product",
        "hires sweep parallel=sp,pp batch=4,8 image=512,1024 --where 'image * batch <= 4096'",
        "hires sweep parallel=sp,pp --repeat 3 --order interleaved           for error bars",
        "hires sweep experiment=layouts --dry-run                            only look",
    ),
    *composing(sweep_overrides),
    option("--zip", action="append", metavar="A,B", help="pair the values of these keys"),
    option("--where", metavar="EXPR", help="keep points of which this is true, as 'image <= 512'"),
    option(
        "--repeat", type=positive, default=1, metavar="N", help="complete attempts of every point"
    ),
    option(
        "--order",
        choices=ORDERS,
        default=ORDERS[0],
        help="all attempts of a point together, or one of every point in turn",
    ),
    option(
        "--max-parallel",
        type=positive,
        metavar="N",
        help="points that run at once (default: 1; launcher=slurm: as many as the cluster allows)",
    ),
    option(
        "--budget-gpu-hours",
        type=_hours,
        metavar="H",
        help="start nothing more once ranks times hours of this command reach it (launcher=slurm: "
        "refuse points that may need more)",
    ),
    *AFTER,
    flag("--again", help="run what is complete already, too"),
    flag("--dry-run", help="plan and show, write nothing"),
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Runs a sweep, or shows it; returns the exit code."""
    args = PARSER.read(words)
    extra = Path(args.config_dir).expanduser() if args.config_dir else None
    typed, stored = taken_out(args.overrides, extra)
    options = _merged(words, args, stored)
    known = groups(extra)
    where = None if options.where is None else Where(options.where, known)
    grid = grid_of([*stored.words, *typed], options.zip or [], known)
    points = compose_all(grid, Composer(args.config_dir), where)
    if not points.held:
        raise ConfigError(f"--where {options.where!r} keeps none of {points.left_out} points")
    if args.cfg:
        return _print_configs(points)
    configs = [point.config for point in points.held if point.config]
    check_launcher(configs, options.repeat, options.order)
    launcher = launcher_of(configs[0])
    after = launcher.dependency(options.after, options.after_any, configs[0].results)
    sweep = Sweep(points, ["hires", "sweep", *words], args.config_dir, options, after)
    if args.dry_run:
        _plan(sweep)
        if options.json:
            print(json.dumps(as_json(points), indent=2))
        else:
            print_points(points, options.repeat)
        return 0 if points.valid else PlanError.exit_code
    with locked(sweep.folder) as note:
        if note:
            print(f"note: {note}", file=sys.stderr)
        with spawn.warm(configs[0].launcher.threads, keep=True):
            _plan(sweep)
            return run_sweep(sweep)


def _merged(words: Sequence[str], args: argparse.Namespace, stored: Stored) -> argparse.Namespace:
    """Returns the options with those of the experiment in the place of defaults."""
    kept = {name: value for name, value in stored.options.items() if name != "zip" or not args.zip}
    typed = [
        f"--{name.replace('_', '-')}={one}"
        for name, value in kept.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return PARSER.read([*typed, *words])


def _plan(sweep: Sweep) -> None:
    wanted = None if sweep.options.again else sweep.options.repeat
    with Planner(forecasts_s=FORECASTS_S) as planner, PlanningProgress() as progress:
        plan_all(sweep.points, planner, wanted, progress)
    refuse_costly(sweep)


def _print_configs(points: Points) -> int:
    """Prints the config of every point as one YAML document each; returns 0."""
    for point in points.held:
        print(f"--- # {' '.join(' '.join(point.words).split())}")
        if point.config is None:
            print(f"# {point.reason}")
        else:
            print_config(point.config)
    return 0
