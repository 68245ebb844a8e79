"""Compares simulated plans with runs and with the thesis's ratios: ``hires bench simulate``.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
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
from hires.bench.thesis import CANNOT, CLUSTER, Predictor, thesis_ratios
from hires.bench.wires import measure_network
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import timeline
from hires.core.store import file_names, records
from hires.plan.plan import Plan
from hires.plan.simulation.costs import measured_costs
from hires.plan.simulation.simulate import Network, simulate

PARTS = ("runs", "thesis")
RUN = ("model=resnet18", "image=192", "batch=4", "steps=8")
"""Of the runs on this machine, unless the overrides say otherwise."""
LAYOUTS = (
    ("parallel=sp",),
    ("parallel=pp", "parallel.stages=2", "parallel.microbatches=4"),
    ("parallel=gems", "parallel.stages=2"),
    ("parallel=sp+pp", "parallel.stages=2", "parallel.microbatches=2"),
)

RUNS = ("run", "ranks", "measured ms", "simulated ms", "error", "bubble")
THESIS = (
    "ratio", "thesis", "network", "image", "batch", "GPUs", "layout", "over", "predicted",
    "published", "note",
)  # fmt: skip
RUN_NOTES = """\
The simulation of a step is given the seconds that its own actions computed, between one collective
and the next, and the latency and bandwidth that two ranks of this machine measured just before. It
shows whether waits follow from these alone. Ranks that share cores with each other or with other
programs slow their messages down, which no model of a link includes."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return run_benchmark(FORM, argv, _options, _measure)


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
    simulations = [simulate(plan, measured_costs(plan, ranks), network) for ranks in whole.values()]
    measured_s = statistics.median(timeline.length_s(ranks) for ranks in whole.values())
    simulated_s = statistics.median(simulation.step_s for simulation in simulations)
    return {
        "run": run_dir.name,
        "ranks": plan.world,
        "steps": len(whole),
        "measured_s": measured_s,
        "simulated_s": simulated_s,
        "error": simulated_s / measured_s - 1,
        "bubble": statistics.median(simulation.bubble for simulation in simulations),
    }


def _measure(parsed: argparse.Namespace, command: str, progress: Progress) -> Result:
    """Returns the parts that are wanted."""
    result = origin(command)
    if "runs" in parsed.only:
        network = measure_network(parsed.timeout)
        result |= {"network": dataclasses.asdict(network), "runs": []}
        for run in _runs(parsed, network):
            result["runs"].append(run)
            progress.update(result)
    if "thesis" in parsed.only:
        predictor = Predictor()
        result |= {"thesis": [], "devices": {}, "cluster": dataclasses.asdict(CLUSTER)}
        for ratio in thesis_ratios():
            log.info("predicting %s, %s (%s)", ratio.what, ratio.network, ratio.where)
            result["thesis"].append(predictor.predict(ratio))
            devices = predictor.devices.items()
            result["devices"] = {name: dataclasses.asdict(device) for name, device in devices}
            progress.update(result)
    return result


def _runs(parsed: argparse.Namespace, network: Network) -> Iterator[dict[str, Any]]:
    """Compares runs that exist, or else short ones that are made now."""
    if parsed.runs:
        yield from (compare(folder, network) for folder in parsed.runs)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(LAYOUTS):
            log.info("running %s", " ".join(layout))
            words = [*RUN, *layout, *parsed.overrides, f"campaign={number}", f"results={folder}"]
            _run(words, parsed.timeout)
            [run_dir] = Path(folder, str(number)).iterdir()
            yield compare(run_dir, network)


def _run(words: list[str], timeout_s: float) -> None:
    """Makes one run.

    Raises:
        RunError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "hires", "run", *words, "--json"]
    typed = shlex.join(["hires", "run", *words])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{typed}` was not done after {timeout_s:g} s; use --timeout") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"`{typed}` failed: {last}")


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
    add_output(parser, "simulate")
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


def _tables(found: Result) -> list[BenchTable]:
    tables = []
    if "runs" in found:
        rows = [*map(_run_cells, found["runs"])]
        fact = f"{_network(found)}\n{RUN_NOTES}"
        tables.append(BenchTable("Steps on this machine", RUNS, rows, fact=fact))
    if "thesis" in found:
        rows = [*map(_thesis_cells, found["thesis"])]
        title = "Ratios of images per second, predicted beside published"
        tables.append(BenchTable(title, THESIS, rows, fact=f"{_device(found)}\n{CANNOT}"))
    return tables


def _run_cells(row: dict[str, Any]) -> list[str]:
    """Returns a compared run as text."""
    return [
        row["run"],
        str(row["ranks"]),
        f"{row['measured_s'] * 1e3:.1f}",
        f"{row['simulated_s'] * 1e3:.1f}",
        f"{row['error']:+.1%}",
        f"{row['bubble']:.0%}",
    ]


def _thesis_cells(row: dict[str, Any]) -> list[str]:
    """Returns a predicted ratio as text."""
    return [
        row["what"],
        row["where"],
        row["model"],
        str(row["image"]),
        str(row["batch"]),
        str(row["layout"]["gpus"]),
        row["layout"]["name"],
        row["base"]["name"],
        f"{row['predicted']:.2f}",
        "-" if row["published"] is None else f"{row['published']:.1f}",
        row["note"] or "-",
    ]


def _network(found: dict[str, Any]) -> str:
    """Returns the measured links in words."""
    near = found["network"]["near"]
    return (
        f"Links: {near['latency_s'] * 1e6:.0f} us, {near['bytes_per_s'] / 1e9:.1f} GB/s; a small "
        f"gather {found['network']['small_latency_s'] * 1e6:.0f} us."
    )


def _device(found: dict[str, Any]) -> str:
    """Returns the model of the device and its links in words."""
    speeds = ", ".join(
        f"{name} {device['flops_per_s'] / 1e12:.2f} TFLOP/s"
        for name, device in found["devices"].items()
    )
    device = next(iter(found["devices"].values()))
    near, far = found["cluster"]["near"], found["cluster"]["far"]
    return (
        f"Device: an A100 that reaches {speeds} in convolutions (so that ResNet-101 at 256x256 in "
        f"batches of 64 infers as fast as in Table 2.1), {device['bytes_per_s'] / 1e9:.0f} GB/s "
        f"from memory, {device['launch_s'] * 1e6:.0f} us for the smallest operation. Links: "
        f"{near['bytes_per_s'] / 1e9:.0f} GB/s and {near['latency_s'] * 1e6:.0f} us in a node of "
        f"{found['cluster']['ranks_per_node']}, {far['bytes_per_s'] / 1e9:.1f} GB/s and "
        f"{far['latency_s'] * 1e6:.0f} us between nodes."
    )


FORM = Form("simulate", _tables)


if __name__ == "__main__":
    sys.exit(main())
