"""``hires sweep``: run every combination of several values of some keys, or a stored sweep."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from hires.cli.axes import axes_of, stored_sweep
from hires.cli.compose_config import Composer
from hires.cli.execution import GROUPED, INTERLEAVED, Sweep, print_points, run_sweep
from hires.cli.options import AFTER, JSON, STARTING, Parser, composing, flag, number, option
from hires.cli.planning import Planner
from hires.cli.screen import plural, print_config, print_json
from hires.cli.sweep_points import (
    Points,
    Where,
    begin_with,
    compose_all,
    drop_duplicates,
    plan_all,
    preceding,
)
from hires.core.config.run_config import to_dict
from hires.core.store import campaign
from hires.launcher.ranks import spawn

PARSER = Parser(
    "sweep",
    (
        "hires sweep parallel=sp,sp+gems precision=fp32,bf16 image=512,1024",
        "hires sweep image=256,512,1024 batch=16,8,2 --zip image,batch      pairs, no product",
        "hires sweep parallel=sp,pp batch=4,8 image=512,1024 --where 'image * batch <= 4096'",
        "hires sweep parallel=sp,pp --repeat 3 --order interleaved           for error bars",
        "hires sweep experiment=layouts --dry-run                            only look",
        "hires sweep experiment=table2.2                                     train, then evaluate",
    ),
    *composing(),
    option(
        "--first",
        "KEY=VALUE",
        "run each point with these overrides first, and begin it with the weights of that run",
        action="append",
    ),
    option("--zip", "A,B", "pair the values of these keys", action="append"),
    option("--where", "EXPR", "keep points of which this is true, as 'image <= 512'"),
    number("--repeat", "complete attempts of every point", default=1),
    option(
        "--order",
        None,
        "all attempts of a point together, or one of every point in turn",
        choices=(GROUPED, INTERLEAVED),
        default=GROUPED,
    ),
    number(
        "--max-parallel",
        "points that run at once (default: 1; launcher=slurm: as many as the cluster allows)",
    ),
    *AFTER,
    flag("--memory", "show the memory of every rank at the end, too"),
    flag("--again", "run what is complete already, too"),
    *STARTING,
    flag("--dry-run", "plan and show, write no run folder or script (run writes them)"),
    JSON,
)


def main(args: argparse.Namespace) -> int:
    """Runs a sweep, or shows it; returns the exit code."""
    extra = Path(args.config_dir).expanduser() if args.config_dir else None
    typed, stored = stored_sweep(args.overrides, extra)
    # The options of a stored sweep stand before those that were typed, which win.
    defaults = [
        f"--{name.replace('_', '-')}={one}"
        for name, value in stored.options.items()
        if name != "zip" or not args.zip
        for one in (value if isinstance(value, list) else [value])
    ]
    options = PARSER.read([*defaults, *args.argv[2:]])
    composer = Composer(args.config_dir)
    where = None if options.where is None else Where(options.where, composer.groups)
    words = [*stored.words, *typed]
    axes = axes_of(words, options.zip or [], composer.groups)
    points = compose_all(axes, composer, where)
    before = preceding(points, options.first, composer) if options.first else Points()
    if args.cfg:
        if args.json:
            print_json({"points": [p.config and to_dict(p.config) for p in points.listed]})
        for point in () if args.json else [*before.listed, *points.listed]:
            print(f"--- # {' '.join(' '.join(point.words).split())}")
            if point.config is None:
                print(f"# {point.reason}")
            else:
                print_config(point.config)
        return 0
    options.argv = args.argv
    planner = Planner()
    sweep = Sweep(points, options, planner)
    with contextlib.ExitStack() as stack:
        if not args.dry_run:
            note = stack.enter_context(campaign.locked(sweep.folder))
            if note:
                print(f"note: {note}", file=sys.stderr)
            stack.enter_context(spawn.warm(sweep.threads, keep=True))
        code, facts = 0, {}
        if before.listed:
            # One attempt is enough: every repeat of a point begins with the same weights.
            once = argparse.Namespace(**{**vars(options), "repeat": 1})
            code, first = _run(Sweep(before, once, planner))
            facts["first"] = first
        if begin_with(points, composer) or args.dry_run:
            code, more = _run(sweep)
            facts |= more
        else:
            text = f"{plural(len(points.listed), 'point')} to follow"
            print(f"{text}: run the same command once these are done", file=sys.stderr)
    if options.json:
        print_json(facts)
    return code


def _run(sweep: Sweep) -> tuple[int, dict[str, Any]]:
    """Plans all points, shows them, calibrates for those that can run, and runs them."""
    options, points, planner = sweep.options, sweep.points, sweep.planner
    wanted = None if options.again else options.repeat
    more = getattr(options, "continue"), options.config_dir
    with planner, tempfile.TemporaryDirectory(prefix="hires-sweep-") as folder:
        plan_all(points, planner, wanted, *more, folder)
        lack_scales = [point for point in points.valid if point.calibrates]
        if options.dry_run or not lack_scales:
            drop_duplicates(points)
        if not options.json:
            print_points(points, options.repeat)
        if lack_scales and not options.dry_run:
            plan_all(Points(lack_scales), planner, wanted, *more)
            drop_duplicates(points)
    with planner:  # its process with torch starts again if it is asked
        return run_sweep(sweep)
