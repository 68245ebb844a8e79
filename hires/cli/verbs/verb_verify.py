"""``hires verify``: compares a layout with one process.

Rank 0 compares one step in float64 with one process on the same microbatches (``verify.json``).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from argparse import Namespace
from typing import Any

from hires.cli.compose.compose_config import compose
from hires.cli.options import JSON, Parser, composing
from hires.cli.planning import planned, require_feasible, with_classes
from hires.cli.screens.screen import print_config, print_table
from hires.cli.start_run import explain, wait_for
from hires.core.config.precision_config import PrecisionConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, reading
from hires.core.store.rundir import create
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn
from hires.report.columns import Column

BOUND = 1e-10
"""Largest difference that passes, relative to the largest value of each tensor."""

_SHOWN = 4
"""Tensors that a line names."""

PARSER = Parser(
    "verify",
    (
        "hires verify parallel=sp 'parallel.tiles=[3,1]' 'image=[75,61]'",
        "hires verify parallel=sp+pp parallel.microbatches=4 --json",
        "hires verify model=custom model.target=package.module:function parallel=sp",
    ),
    *composing(),
    JSON,
)


def main(args: Namespace) -> int:
    """Prints the largest relative errors; returns 0 if all are within 1e-10 or noise, else 1."""
    config = compose(args.overrides, args.config_dir)
    config = dataclasses.replace(config, precision=PrecisionConfig("fp64"))
    if args.cfg:
        return print_config(config)
    if launcher_of(config).has_jobs:
        raise ConfigError(
            f"launcher={config.launcher.name} cannot verify: the ranks run on this machine; leave "
            f"it out"
        )
    folders = tempfile.TemporaryDirectory(prefix="hires-verify-")
    with folders as folder, spawn.warm(config.launcher.threads):
        config = with_classes(dataclasses.replace(config, results=folder))
        plan = planned(config, memory=False)  # rank 0 holds the whole network besides
        require_feasible(plan)
        run = create(config, plan.to_dict(), args.argv)
        outcome = wait_for(config, run, plan.world, args=("--verify",))
        file = run.attempt_dir / file_names.VERIFY
        if not file.exists():
            if outcome.exit_code == 0:
                raise RunError("the ranks ended without comparing anything")
            explain(outcome, run, keep=False)
            return outcome.exit_code
        answer = reading.read_json(file)
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    return 0 if answer["ok"] else RunError.exit_code


def _print(answer: dict[str, Any]) -> None:
    rows = []
    for kind, worst in answer["worst"].items():
        cells = ("-", "-", "-", "not compared")
        if worst is not None:
            noise = "-" if worst["noise"] is None else f"{worst['noise']:.2e}"
            passed = "ok" if worst["error"] <= BOUND else "ok: noise"
            verdict = passed if worst["ok"] else "too large"
            cells = (worst["name"].partition("/")[2], f"{worst['error']:.2e}", noise, verdict)
        rows.append((kind.replace("_", " "), *cells))
    numbers = [Column(name, name, digits=2) for name in ("error", "noise")]
    print_table("Largest relative error", ("compared", "tensor", *numbers, ""), rows)
    verdict = "equal" if answer["ok"] else "NOT equal"
    print(f"{verdict} to one process: {answer['max_rel_err']:.2e}, allowed {BOUND:.0e}")
    if names := answer["by_noise"]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        print(
            f"allowed ten times their float64 noise, measured by reordering samples or moving "
            f"pixels by one ulp: {', '.join(names[:_SHOWN])}{more}"
        )
