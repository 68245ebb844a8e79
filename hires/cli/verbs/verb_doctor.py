"""``hires doctor``: is this machine ready, and with ``launcher=slurm`` the cluster's nodes?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from hires.cli.doctor.machine_checks import FAILED, OK, Check, machine_checks
from hires.cli.doctor.mpi_checks import mpi_checks
from hires.cli.doctor.slurm_checks import slurm_checks
from hires.cli.doctor.torch_checks import torch_checks
from hires.cli.options import Parser, add_json, add_overrides
from hires.cli.screens.screen import print_config
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError

PATIENCE_S = 600
_EXAMPLES = (
    "hires doctor                             this machine",
    "hires doctor launcher=slurm --nodes 2    this machine, and two nodes by a job of its own",
    "hires doctor --json",
)


def main(words: Sequence[str]) -> int:
    """Prints one line a check, each with a remedy if it is not ok; returns 1 if one failed."""
    text = "Check what this machine and its cluster have, and say what would help."
    parser = Parser("doctor", text, _EXAMPLES)
    add_overrides(parser)
    parser.add_argument(
        "--nodes", type=_count, metavar="N", help="machines that runs are to use (launcher.nodes)"
    )
    parser.add_argument(
        "--patience",
        type=_count,
        default=PATIENCE_S,
        metavar="S",
        help=f"seconds that the job may wait and take (default: {PATIENCE_S})",
    )
    add_json(parser)
    args = parser.read(words)
    config = _config(args)
    if args.cfg:
        return print_config(config)
    checks = all_checks(config, ["hires", "doctor", *words], args.patience)
    ok = all(check.state != FAILED for check in checks)
    if args.json:
        body = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(body, indent=2))
    else:
        print("\n".join(lines(checks)))
    return 0 if ok else RunError.exit_code


def all_checks(config: RunConfig, argv: Sequence[str], patience_s: float) -> list[Check]:
    """Returns all lines, those of the cluster's nodes if the launcher is Slurm.

    Args:
        config: which launcher, how many nodes, and where results are kept.
        argv: the command line as typed.
        patience_s: how long a job may take.
    """
    found = machine_checks(Path(config.results), config.launcher.nodes)
    found += [*torch_checks(), *mpi_checks()]
    slurm = slurm_checks(config)
    found += slurm
    if config.launcher.name == "slurm" and all(check.state != FAILED for check in slurm):
        from hires.cli.doctor.cluster_checks import cluster_checks

        found += cluster_checks(config, argv, patience_s)
    return found


def lines(checks: Sequence[Check]) -> list[str]:
    """Returns a table of checks; below each that is not ok stands what would help."""
    rows = [(check.where, check.name, check.state) for check in checks]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    found = []
    for row, check in zip(rows, checks, strict=True):
        head = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        found.append(f"{head}  {' '.join(check.text.split())}")
        if check.remedy and check.state != OK:
            found.append(f"{'':<{len(head)}}  -> {' '.join(check.remedy.split())}")
    return found


def _config(args: argparse.Namespace) -> RunConfig:
    """Returns the config; where none was asked for, one that needs nothing to be installed."""
    if not args.overrides and not args.config_dir:
        config = RunConfig()
    else:
        from hires.cli.compose.compose_config import compose

        config = compose(args.overrides, args.config_dir)
    if args.nodes is not None:
        config = dataclasses.replace(
            config, launcher=dataclasses.replace(config.launcher, nodes=args.nodes)
        )
    return config


def _count(text: str) -> int:
    """Returns a number that is 1 or more."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return value
