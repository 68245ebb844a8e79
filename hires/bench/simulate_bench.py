"""Compares simulated plans with runs and with the thesis's ratios: ``hires bench simulate``.

``python -m hires.bench.simulate_bench`` runs small layouts here, simulates each of their steps from
the run's own action times and the measured links, predicts it from this machine's calibration
(`hires doctor --calibrate`), and predicts the thesis's ratios on its machine, and the memory that
it publishes.
Exit codes: 0 done, 1 a run failed, 2 bad options, 3 a layout cannot be planned.

Example: hires bench simulate model=resnet34 image=256 --only runs
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, names_of, option
from hires.bench.link_times import measure_links
from hires.bench.ranks import run_program
from hires.bench.thesis import BOUND, MEANING, RATIOS, device, factor_off, predict
from hires.bench.thesis_memory import FIGURES, RATIOS_MEANING, predict_memory
from hires.bench.thesis_memory import MEANING as MEMORY_MEANING
from hires.bench.thesis_memory import RATIOS as MEMORY_RATIOS
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.python_command import module_command
from hires.core.ranks import timeline
from hires.core.store import file_names, records
from hires.plan.message_routes import RouteCase
from hires.plan.plan import Plan
from hires.plan.route_choice import OF_ALL, table_of
from hires.plan.routes import parse_route
from hires.plan.simulation.costs import measured_costs
from hires.plan.simulation.machine_calibration import (
    DEFAULTS,
    Calibration,
    calibration_or_defaults,
)
from hires.plan.simulation.machine_model import MachineModel, cores_of
from hires.plan.simulation.measured_network import MeasuredNetwork
from hires.plan.simulation.published_machine import CLUSTER
from hires.plan.simulation.simulate import Network, simulate
from hires.plan.table_gains import MeasuredSeconds

PARTS = ("runs", "thesis", "memory")
RUN = ("model=resnet18", "image=192", "batch=4", "steps=8")
"""Of the runs on this machine, unless the overrides say otherwise."""
LAYOUTS = (
    ("parallel=sp",),
    ("parallel=pp", "parallel.stages=2", "parallel.microbatches=4"),
    ("parallel=gems", "parallel.stages=2"),
    ("parallel=sp+pp", "parallel.stages=2", "parallel.microbatches=2"),
)

LINKS = "links"
"""Where messages take their seconds from, of a run whose table has measured nothing."""

RUN_NOTES = """\
The simulation of a step is given the seconds that its own actions computed, between one collective
and the next. Its messages take what the run's tuning table (`comm.table`) has measured for their
routes, or the latency and bandwidth that two ranks of this machine measured just before. It shows
whether waits follow from these alone. Ranks that share cores with each other or with other programs
slow their messages down, which no model of a link includes. What is predicted takes the seconds of
its nodes from the calibration instead, without any run, and the messages of the simulation."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``hires bench simulate``."""

    overrides: tuple[str, ...] = option(
        (), "of the runs on this machine", flag="overrides", nargs="*", metavar="KEY=VALUE"
    )
    runs: tuple[Path, ...] = option(
        (),
        "folders to compare",
        flag="--from",
        dest="runs",
        nargs="+",
        type=Path,
        metavar="RUN",
    )
    only: tuple[str, ...] = option(",".join(PARTS), "what to simulate", parse=names_of(PARTS))
    timeout: float = option(600.0, "seconds for each run")

    def __post_init__(self) -> None:
        if self.runs and self.overrides:
            raise ConfigError(
                f"{self.overrides[0]} changes runs that are made now, but --from names finished "
                f"ones; leave one of the two out"
            )


def measure(options: SimulateOptions) -> Results:
    """Yields the parts that are wanted, after each run and each predicted ratio."""
    result: Result = {}
    if "runs" in options.only:
        calibration = calibration_or_defaults()
        network = measure_links(options.timeout).network()
        result |= {"network": dataclasses.asdict(network), "runs": []}
        result["calibration"] = calibration.source
        for run in _runs(options, network, calibration):
            result["runs"].append(run)
            yield result
    if "thesis" in options.only:
        result |= {"thesis": [], "devices": {}, "cluster": dataclasses.asdict(CLUSTER)}
        for ratio in RATIOS:
            log.info("predicting %(what)s, %(network)s (%(where)s)", ratio)
            row = predict(ratio)
            result["thesis"].append(row)
            for precision in (row[side]["precision"] for side in ("base", "layout")):
                result["devices"][precision] = dataclasses.asdict(device(precision))
            yield result
    if "memory" in options.only:
        result |= {"memory": [], "memory_ratios": []}
        for key, figures in (("memory", FIGURES), ("memory_ratios", MEMORY_RATIOS)):
            for figure in figures:
                log.info("predicting the memory of %(what)s (%(where)s)", figure)
                result[key].append(predict_memory(figure))
                yield result


def compare(run_dir: Path, network: Network, calibration: Calibration = DEFAULTS) -> dict[str, Any]:
    """Returns the median of a run's measured steps beside that of the simulated ones.

    Each is simulated from its own action times, and one is predicted from a calibration alone;
    RunError: the last attempt kept no time line.
    """
    record = records.read_record(run_dir)
    attempt = file_names.attempt_dir(run_dir, record["attempt"] if record else 0)
    steps = timeline.read(attempt)
    plan = Plan.from_dict(records.read_plan(run_dir))
    whole = timeline.complete_steps(steps, plan.world)
    source = LINKS
    with contextlib.suppress(HiresError):  # without its config, or its table
        network = network_of(records.read_config(run_dir), plan.device, network)
        if isinstance(network, MeasuredNetwork):
            source = source_words(plan, network)
    simulations = [simulate(plan, measured_costs(plan, ranks), network) for ranks in whole.values()]
    measured_s = statistics.median(timeline.length_s(ranks) for ranks in whole.values())
    simulated_s = statistics.median(simulation.step_s for simulation in simulations)
    machine = MachineModel("", network, calibration, cores=cores_of(calibration))
    predicted_s = machine.step_time(plan).step_s
    return {
        "run": run_dir.name,
        "ranks": plan.world,
        "steps": len(whole),
        "messages": source,
        "measured_s": measured_s,
        "simulated_s": simulated_s,
        "error": simulated_s / measured_s - 1,
        "predicted_s": predicted_s,
        "predicted_error": predicted_s / measured_s - 1,
        "bubble": statistics.median(simulation.bubble for simulation in simulations),
    }


def network_of(config: RunConfig, device: str, network: Network) -> Network:
    """Returns a network whose messages take what the tuning table of a run has measured.

    The given one where the table has measured nothing; ConfigError: the table is gone.
    """
    table = table_of(config)
    if not table.points:
        return network
    return MeasuredNetwork(**vars(network), measured=MeasuredSeconds(table), device=device)


def source_words(plan: Plan, network: MeasuredNetwork) -> str:
    """Returns which table the messages of a plan take their seconds from, and how many of them."""
    rows = [(RouteCase(*row[:-1]), parse_route(row[-1])) for row in plan.routes]
    held = [network.has_measured(*row) for row in rows if row[0].place != OF_ALL]
    table = plan.table
    name = f"table {table.get('name', '')} {str(table.get('digest', ''))[:8]}".rstrip()
    missing = len(held) - sum(held)
    return name if not missing else f"{name}, {missing} of {len(held)} cases by links"


def _runs(
    options: SimulateOptions, network: Network, calibration: Calibration
) -> Iterator[dict[str, Any]]:
    """Compares runs that exist, or else short ones that are made now."""
    if options.runs:
        yield from (compare(folder, network, calibration) for folder in options.runs)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(LAYOUTS):
            log.info("running %s", " ".join(layout))
            words = ["run", *RUN, *layout, *options.overrides]
            words += [f"campaign={number}", f"results={folder}"]
            command = module_command("hires", *words, "--json")
            run_program(f"`{shlex.join(['hires', *words])}`", command, options.timeout)
            [run_dir] = Path(folder, str(number)).iterdir()
            yield compare(run_dir, network, calibration)


def _tables(result: Result) -> list[BenchTable]:
    tables = []
    if "runs" in result:
        near, gather_s = result["network"]["near"], result["network"]["small_latency_s"]
        links = (
            f"Links: {near['latency_s'] * 1e6:.0f} us, {near['bytes_per_s'] / 1e9:.1f} GB/s; a "
            f"small gather {gather_s * 1e6:.0f} us. Calibration: {result['calibration']}."
        )
        rows = [*map(_run_cells, result["runs"])]
        tables.append(BenchTable("Steps on this machine", rows, fact=f"{links}\n{RUN_NOTES}"))
    if result.get("thesis"):
        rows = [cells for row in result["thesis"] for cells in _thesis_rows(row)]
        title = "Ratios of images per second, predicted beside published"
        tables.append(BenchTable(title, rows, fact=f"{_device(result)}\n{MEANING}"))
    if result.get("memory"):
        cells = [one for figure in result["memory"] for one in _memory_cells(figure)]
        tables.append(BenchTable("Memory in inference", cells, fact=MEMORY_MEANING))
    if result.get("memory_ratios"):
        cells = [one for figure in result["memory_ratios"] for one in _memory_cells(figure)]
        title = "Ratios of memory in inference, predicted beside published"
        tables.append(BenchTable(title, cells, fact=RATIOS_MEANING))
    return tables


def _run_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "run": row["run"],
        "ranks": str(row["ranks"]),
        "messages": row["messages"],
        "measured ms": f"{row['measured_s'] * 1e3:.1f}",
        "simulated ms": f"{row['simulated_s'] * 1e3:.1f}",
        "error": f"{row['error']:+.1%}",
        "predicted ms": f"{row['predicted_s'] * 1e3:.1f}",
        "its error": f"{row['predicted_error']:+.1%}",
        "bubble": f"{row['bubble']:.0%}",
    }


def _thesis_rows(row: dict[str, Any]) -> list[dict[str, str]]:
    """Returns a row, and below it its hypotheses if it is a question."""
    if factor_off(row) <= BOUND:
        return [_thesis_cells(row, row["what"], "agrees")]
    rows = [_thesis_cells(row, row["what"], "a question")]
    for asked in row["hypotheses"]:
        verdict = "an answer" if factor_off(asked) <= BOUND else "no answer"
        rows.append(_thesis_cells(asked, f"? {asked['what']}", verdict))
    return rows


def _thesis_cells(row: dict[str, Any], ratio: str, verdict: str) -> dict[str, str]:
    published = row["published"]
    return {
        "ratio": ratio,
        "thesis": row["where"],
        "network": row["model"],
        "image": str(row["image"]),
        "batch": str(row["batch"]),
        "GPUs": str(row["layout"]["gpus"]),
        "layout": row["layout"]["name"],
        "over": row["base"]["name"],
        "predicted": f"{row['predicted']:.2f}",
        "published": "-" if published is None else f"{published:.2f}",
        "off by": "-" if published is None else f"{factor_off(row):.2f}",
        "verdict": "-" if published is None else verdict,
        "reading": row["says"],
    }


def _memory_cells(figure: dict[str, Any]) -> Iterator[dict[str, str]]:
    published = figure["published"]
    for reading in figure["readings"]:
        unit = " GB" if "predicted_gb" in reading else ""
        predicted = reading["predicted_gb"] if unit else reading["predicted"]
        off = max(predicted / published, published / predicted)
        yield {
            "figure": figure["what"],
            "thesis": figure["where"],
            "batch": str(figure["batch"]),
            "GPUs": str(reading["gpus"]),
            f"predicted{unit}": f"{predicted:.2f}",
            "published": f"{published:.2f}",
            "off by": f"{off:.2f}",
            "verdict": "an answer" if off <= BOUND else "no answer",
            "reading": reading["says"],
        }


def _device(result: dict[str, Any]) -> str:
    """Returns the model of the device and its links in words."""
    speeds = ", ".join(
        f"{name} {device['flops_per_s'] / 1e12:.2f} TFLOP/s"
        for name, device in result["devices"].items()
    )
    device = next(iter(result["devices"].values()))
    near, far = result["cluster"]["near"], result["cluster"]["far"]
    return (
        f"Device: an A100 that reaches {speeds} in convolutions (so that MPI4DL's ResNet of depth "
        f"110 at 256x256 in batches of 64 infers as fast as in Table 2.1; the A100's peak in fp32 "
        f"is 19.5 TFLOP/s, so those of FP32 ran in TF32, torch's default), "
        f"{device['bytes_per_s'] / 1e9:.0f} GB/s from memory, "
        f"{device['launch_s'] * 1e6:.0f} us for the smallest operation. Links: "
        f"{near['bytes_per_s'] / 1e9:.0f} GB/s and {near['latency_s'] * 1e6:.0f} us in a node of "
        f"{result['cluster']['ranks_per_node']}, {far['bytes_per_s'] / 1e9:.1f} GB/s and "
        f"{far['latency_s'] * 1e6:.0f} us between nodes."
    )


BENCHMARK = Benchmark("simulate", __doc__, SimulateOptions, measure, _tables)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
