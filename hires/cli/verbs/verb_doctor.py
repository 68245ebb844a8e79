"""``hires doctor``: check what this machine and its cluster have, and say what would help."""

from __future__ import annotations

import dataclasses
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import compose
from hires.cli.data_keys import with_classes
from hires.cli.doctor_checks import guarded, machine_checks, mpi_checks, torch_checks
from hires.cli.options import JSON, Parser, composing, flag, number
from hires.cli.screens.screen import print_config, print_json, print_lines, table_lines
from hires.cli.verbs.verb_bench import become
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, RunError
from hires.launcher.doctor_check import FAILED, OK, WARNING, Check
from hires.launcher.interface import all_launchers, launcher_of
from hires.plan.simulation.machine_calibration import (
    calibration_or_defaults,
    load_calibration,
)

PARSER = Parser(
    "doctor",
    (
        "hires doctor                             this machine",
        "hires doctor launcher=slurm --nodes 2    this machine, and two nodes by a job of its own",
        "hires doctor --calibrate                 measures operators and links, to predict steps",
        "hires doctor --calibrate model=unet image=256 batch=8    and the layers of this network",
        "hires doctor --json",
    ),
    *composing(),
    number("--nodes", "machines that runs are to use (launcher.nodes)"),
    flag("--calibrate", "measure this machine for predicted step times, up to two minutes"),
    number("--timeout", "seconds that the job may wait and take", default=600),
    JSON,
)


def main(args: Namespace) -> int:
    """Prints one line a check, each with a remedy if it is not ok; returns 1 if one failed."""
    if args.calibrate:
        return calibrate(args)
    config = RunConfig()  # the defaults need no Hydra to be installed
    if args.overrides or args.config_dir:
        config = compose(args.overrides, args.config_dir)
    if args.nodes is not None:
        launcher = dataclasses.replace(config.launcher, nodes=args.nodes)
        config = dataclasses.replace(config, launcher=launcher)
    if args.cfg:
        return print_config(config, args.json)
    checks = all_checks(config, args.argv, args.timeout)
    ok = all(check.state != FAILED for check in checks)
    body = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
    if args.json:
        print_json(body)
    else:
        print_lines(lines(checks))
    return 0 if ok else RunError.exit_code


def calibrate(args: Namespace) -> int:
    """Becomes the measurement of this machine, and of the layers of a network if keys name one."""
    if args.config_dir or args.cfg or args.nodes is not None:
        raise ConfigError(
            "`hires doctor --calibrate` measures this machine and takes no --config-dir, --cfg "
            "or --nodes; keys of a network add its layers"
        )
    config = to_dict(with_classes(compose(args.overrides))) if args.overrides else None
    task = {"kind": "calibrate", "name": "calibrate", "command": shlex.join(args.argv)}
    return become({**task, "config": config, "timeout": 1200, "out": "", "json": args.json})


def all_checks(config: RunConfig, argv: Sequence[str], timeout_s: float) -> list[Check]:
    """Returns all checks; those of the nodes by a job, if the launcher has jobs."""
    checks = machine_checks(Path(config.results), config.launcher.nodes)
    checks += [*torch_checks(), guarded("calibration", calibration_check), *mpi_checks()]
    of_launchers = [check for one in all_launchers() for check in one.checks(config)]
    checks += of_launchers
    if all(check.state != FAILED for check in of_launchers):
        checks += launcher_of(config).node_checks(config, argv, timeout_s)
    return checks


def calibration_check() -> Check:
    """Whether step times are predicted from what was measured here, and how old that is."""
    name = "calibration"
    try:
        calibration = load_calibration()
    except ConfigError as error:
        text, _, remedy = str(error).rpartition("; ")
        return Check(name, WARNING, text, remedy)
    if calibration is None:
        return Check(name, OK, f"none: steps are predicted with {calibration_or_defaults().source}")
    return Check(name, OK, f"{calibration.source}, {calibration.age}")


def lines(checks: Sequence[Check]) -> list[str]:
    """Returns a table of checks; below each that is not ok stands what would help."""
    rows: list[tuple[str, str, str, str]] = []
    for check in checks:
        rows.append((check.where, check.name, check.state, " ".join(check.text.split())))
        if check.remedy and check.state != OK:
            rows.append(("", "", "", f"-> {' '.join(check.remedy.split())}"))
    return table_lines(rows, "llll", heads=False, names=("where", "check", "state", "text"))
