"""Does the simulation of a plan foretell its step? And what does it say about the thesis's layouts?

``python -m hires.bench.simulate_bench`` runs a few small layouts on this machine and prints each
measured step beside the one simulated from the run's own action times and the measured links; then
it predicts the thesis's ratios on its machine and prints them beside the published ones. Exit
codes: 0 done, 1 a run failed, 2 bad options, 3 a layout cannot be planned.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.bench import simulate_table as table
from hires.bench.answers import Form, add_output, origin, tell
from hires.bench.thesis import CLUSTER, Predictor, rows
from hires.bench.wires import measure_network
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import timeline
from hires.core.store import file_names, records
from hires.plan.plan import Plan
from hires.plan.simulation.costs import measured_costs
from hires.plan.simulation.links import Network
from hires.plan.simulation.simulate import simulate

FORM = Form("simulate", table.text, table.readme)
PARTS = ("runs", "thesis")
RUN = ("model=resnet18", "image=192", "batch=4", "steps=8")
"""Of the runs on this machine, unless the overrides say otherwise."""
LAYOUTS = (
    ("parallel=sp",),
    ("parallel=pp", "parallel.stages=2", "parallel.microbatches=4"),
    ("parallel=gems", "parallel.stages=2"),
    ("parallel=sp+pp", "parallel.stages=2", "parallel.microbatches=2"),
)

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return tell(FORM, argv, _options, _answer)


def compare(run_dir: Path, network: Network) -> dict[str, Any]:
    """Returns a run's measured step beside the one simulated from its own action times.

    Each kept step is simulated from what it measured itself; medians of both are compared.

    Args:
        run_dir: a run folder whose last attempt kept a time line.
        network: the links between its ranks.

    Raises:
        RunError: it kept none.
    """
    record = records.read_record(run_dir)
    attempt = file_names.attempt_dir(run_dir, record["attempt"] if record else 0)
    steps = timeline.read(attempt)
    plan = Plan.from_dict(records.read_plan(run_dir))
    whole = timeline.complete_steps(steps, plan.world)
    found = [simulate(plan, measured_costs(plan, ranks), network) for ranks in whole.values()]
    measured_s = statistics.median(timeline.length_s(ranks) for ranks in whole.values())
    simulated_s = statistics.median(simulation.step_s for simulation in found)
    return {
        "run": run_dir.name,
        "ranks": plan.world,
        "steps": len(whole),
        "measured_s": measured_s,
        "simulated_s": simulated_s,
        "error": simulated_s / measured_s - 1,
        "bubble": statistics.median(simulation.bubble for simulation in found),
    }


def _answer(parsed: argparse.Namespace, command: str) -> dict[str, Any]:
    """Returns the parts that are wanted."""
    found = origin(command)
    if "runs" in parsed.only:
        network = measure_network(parsed.timeout)
        found["network"] = dataclasses.asdict(network)
        found["runs"] = _runs(parsed, network)
    if "thesis" in parsed.only:
        found |= _thesis()
    return found


def _runs(parsed: argparse.Namespace, network: Network) -> list[dict[str, Any]]:
    """Compares runs that exist, or else short ones that are made now."""
    if parsed.runs:
        return [compare(folder, network) for folder in parsed.runs]
    compared: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            log.info("running %s", " ".join(layout))
            campaign = f"campaign={len(compared)}"
            _run([*RUN, *layout, *parsed.overrides, campaign, f"results={folder}"], parsed.timeout)
            [run_dir] = Path(folder, str(len(compared))).iterdir()
            compared.append(compare(run_dir, network))
    return compared


def _run(words: list[str], timeout_s: float) -> None:
    """Makes one run.

    Raises:
        RunError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "hires", "run", *words, "--json"]
    said = shlex.join(["hires", "run", *words])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{said}` was not done after {timeout_s:g} s; use --timeout") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(f"`{said}` failed: {last}")


def _thesis() -> dict[str, Any]:
    """Predicts the thesis's ratios."""
    predictor = Predictor()
    predicted = []
    for row in rows():
        log.info("predicting %s, %s (%s)", row.what, row.model["name"], row.where)
        predicted.append(predictor.predict(row))
    devices = {name: dataclasses.asdict(device) for name, device in predictor.devices.items()}
    return {"thesis": predicted, "devices": devices, "cluster": dataclasses.asdict(CLUSTER)}


def _options(words: Sequence[str]) -> argparse.Namespace:
    """Returns the checked options.

    Raises:
        ConfigError: one of them makes no sense.
    """
    parser = argparse.ArgumentParser(
        prog="hires bench simulate",
        description=__doc__,
        epilog="example: hires bench simulate model=resnet34 image=256 --only runs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of the runs on this machine")
    add("--from", dest="runs", nargs="+", type=Path, metavar="RUN", help="run folders to compare")
    add("--only", default=",".join(PARTS), help="runs, thesis, or both (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for each run (default: %(default)s)")
    add_output(parser, FORM.name)
    parsed = parser.parse_intermixed_args(list(words))
    parsed.only = [name for name in parsed.only.split(",") if name]
    if not parsed.only or set(parsed.only) - set(PARTS):
        raise ConfigError(f"--only {','.join(parsed.only)} must be of {','.join(PARTS)}")
    if parsed.runs and parsed.overrides:
        raise ConfigError(
            f"{parsed.overrides[0]} changes runs that are made now, but --from names finished "
            f"ones; leave one of the two out"
        )
    if parsed.timeout <= 0:
        raise ConfigError(f"--timeout {parsed.timeout:g} must be above 0")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
