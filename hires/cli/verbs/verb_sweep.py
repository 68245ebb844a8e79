"""``hires sweep``: plans many runs from one command, then runs them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import Composer
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
from hires.cli.screens.progress import PlanningProgress
from hires.cli.screens.screen import print_config
from hires.cli.sweep.axes import axes_of, stored_sweep
from hires.cli.sweep.execution import Sweep, check_launcher, refuse_costly, run_sweep
from hires.cli.sweep.sweep_points import ORDERS, Where, compose_all, plan_all
from hires.cli.sweep.sweep_tables import as_json, print_points
from hires.core.errors import ConfigError, PlanError
from hires.core.store import campaign
from hires.core.store.rundir import run_path
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
    typed, stored = stored_sweep(args.overrides, extra)
    # The options of a stored sweep stand before those that were typed, which win.
    defaults = [
        f"--{name.replace('_', '-')}={one}"
        for name, value in stored.options.items()
        if name != "zip" or not args.zip
        for one in (value if isinstance(value, list) else [value])
    ]
    options = PARSER.read([*defaults, *words])
    composer = Composer(args.config_dir)
    where = None if options.where is None else Where(options.where, composer.groups)
    axes = axes_of([*stored.words, *typed], options.zip or [], composer.groups)
    points = compose_all(axes, composer, where)
    if not points.listed:
        raise ConfigError(f"--where {options.where!r} keeps none of {points.left_out} points")
    if args.cfg:
        for point in points.listed:
            print(f"--- # {' '.join(' '.join(point.words).split())}")
            if point.config is None:
                print(f"# {point.reason}")
            else:
                print_config(point.config)
        return 0
    check_launcher(points, options)
    first = next(point.config for point in points.listed if point.config)
    launcher = launcher_of(first)
    after = launcher.dependency(options.after, options.after_any, first.results)
    argv, folder = ["hires", "sweep", *words], run_path(first).parent
    sweep = Sweep(points, argv, options, folder, launcher.has_jobs, after)
    if args.dry_run:
        _plan(sweep)
        if options.json:
            print(json.dumps(as_json(points), indent=2))
        else:
            print_points(points, options.repeat)
        return 0 if points.valid else PlanError.exit_code
    with campaign.locked(folder) as note:
        if note:
            print(f"note: {note}", file=sys.stderr)
        with spawn.warm(first.launcher.threads, keep=True):
            _plan(sweep)
            return run_sweep(sweep)


def _plan(sweep: Sweep) -> None:
    wanted = None if sweep.options.again else sweep.options.repeat
    with Planner(forecasts_s=FORECASTS_S) as planner, PlanningProgress() as progress:
        plan_all(sweep.points, planner, wanted, progress)
    refuse_costly(sweep)
