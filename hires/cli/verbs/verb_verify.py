"""``hires verify``: compare a layout with one process on the same microbatches, in float64.

Rank 0 compares one step with one process in float64 on the same microbatches (``verify.json``). The
layout runs in float64, too, unless the command line names a precision.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from argparse import Namespace
from typing import Any

from hires.cli.compose_config import compose
from hires.cli.options import JSON, Parser, composing
from hires.cli.overrides import key_in
from hires.cli.planning import Planner, require_feasible
from hires.cli.prepare import prepare
from hires.cli.screen import print_config, print_json, print_table
from hires.cli.start_run import ENDS, print_failure, wait_for
from hires.core.codecs import NONE
from hires.core.config.precision_config import INT8, PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, reading
from hires.core.store.rundir import create
from hires.core.units import listed
from hires.launcher.ranks import spawn
from hires.plan.groups import coded_error
from hires.report.columns import Column

MOST_CODED = 0.1
"""Part of a usual number: the largest error of a tensor may be four times as large, and a sum that
is an average is wrong by 0.5."""
_SHOWN = 4
"""Tensors that a line names."""
_EXIT_CODES = {"equal": 0, "not equal": RunError.exit_code, "undecided": ConfigError.exit_code}

PARSER = Parser(
    "verify",
    (
        "hires verify parallel=sp 'parallel.tiles=[3,1]' 'image=[75,61]'",
        "hires verify parallel=sp+pp parallel.microbatches=4 --json",
        "hires verify parallel=sp precision=fp16          within what fp16 rounds",
        "hires verify model=custom model.target=package.module:function parallel=sp",
    ),
    *composing(),
    JSON,
)


def main(args: Namespace) -> int:
    """Prints the largest relative errors; returns 0 if all are allowed, 1 if one is not.

    2: the noise of float64 itself is too large for a verdict.
    """
    config = _as_named(compose(args.overrides, args.config_dir), args.overrides)
    if args.cfg:
        return print_config(config, args.json)
    if config.launcher.has_jobs:
        raise ConfigError(
            f"launcher={config.launcher.name} cannot verify: the ranks run on this machine; leave "
            f"it out"
        )
    folders = tempfile.TemporaryDirectory(prefix="hires-verify-")
    with folders as folder, spawn.warm(config.launcher.threads):
        with Planner() as planner:
            # Calibrations are looked for, and kept, in the results of the user's.
            ready = prepare(config, args.overrides, planner, args.argv)
            config = dataclasses.replace(ready.config, results=folder)
            plan = planner.plan(config, memory=False)  # rank 0 holds the whole network besides
            plan = plan.with_findings(*ready.findings)
        require_feasible(plan)
        if (coded := coded_error(plan)) > MOST_CODED:
            change = f"change, {coded:.0%} of a usual number" if coded < math.inf else "leave out"
            raise ConfigError(
                f"comm.codec={config.comm.codec}: verify cannot tell a fault from what these codes "
                f"{change}; name a finer codec, as bf16, or fewer kinds, as {{gradient: bf16}}"
            )
        run = create(config, plan.to_dict(), args.argv)
        outcome = wait_for(config, run, plan.num_processes, args=("--verify",))
        file = run.attempt_dir / file_names.VERIFY
        if not file.exists():
            if outcome.exit_code == 0:
                raise RunError("the ranks ended without comparing anything")
            print_failure(outcome, run, keep=False, head=False)
            error = RunError(f"the run {ENDS[outcome.state]}: {outcome.cause}")
            error.exit_code = outcome.exit_code
            raise error
        answer = reading.read_json(file)
    if args.json:
        print_json(answer)
    else:
        _print(answer)
    return _EXIT_CODES[answer["verdict"]]


def _as_named(config: RunConfig, words: list[str]) -> RunConfig:
    """Returns a config in float64 with messages to match, but for what the command line names."""
    named = {*map(key_in, words)}
    if not named & {"precision", "precision.name"}:
        config = dataclasses.replace(config, precision=PrecisionConfig("fp64"))
    if "comm.codec" not in named:
        config = dataclasses.replace(config, comm=dataclasses.replace(config.comm, codec=NONE))
    return config


def _print(answer: dict[str, Any]) -> None:
    rows = []
    for kind, worst in answer["worst"].items():
        cells = ["-", "-", "-", "-", "not compared"]
        if worst is not None:
            noise = "-" if worst["noise"] is None else f"{worst['noise']:.2e}"
            numbers = f"{worst['error']:.2e}", noise, f"{worst['allowed']:.0e}"
            cells = [worst["name"].partition("/")[2], *numbers, worst["verdict"]]
        rows.append((kind.replace("_", " "), *cells))
    heads = [Column(name, name, digits=2) for name in ("error", "noise", "allowed")]
    print_table("Largest relative error", ("compared", "tensor", *heads, ""), rows)
    precision, worst, sums = answer["precision"], answer["decisive"], answer.get("float_sums", [])
    rounds = listed(answer.get("codecs") or [precision])
    in_low = "" if precision == "fp64" else f" in float64, within what {rounds} rounds"
    if precision == INT8:
        in_low = f" in {precision}, {'but for sums in float' if sums else 'bit by bit'}"
    if worst is None:
        print(f"cannot be decided: {precision} loses most digits of every tensor; verify fp64")
    elif answer["verdict"] == "undecided":
        print(
            f"cannot be decided: float64 itself differs by {worst['noise']:.2e} in {worst['name']}"
            f", the layout by {worst['error']:.2e}, and at most {worst['allowed']:.0e} is allowed; "
            f"verify fewer layers, or another seed or image"
        )
    else:
        verdict = "equal" if answer["ok"] else "NOT equal"
        differs = f"{worst['error']:.2e}, allowed {worst['allowed']:.0e} ({worst['name']})"
        print(f"{verdict} to one process{in_low}: {differs}")
    measured = f"three times the error of one process in {precision}"
    if precision == "fp64":
        measured = "ten times their float64 noise, measured by moving pixels by ulps"
    for what, names in (
        (f"allowed {measured}", answer["by_noise"]),
        ("not judged, as one process alone loses most digits of them", answer["undecided"]),
        ("summed in float, in an order that follows from the layout", sums),
    ):
        if names:
            print(f"{what}: {listed(names, _SHOWN)}")
