"""Measures inference at several precisions beside other libraries: ``hires bench precision``.

Rows of hires are one thread and two tiles of one thread each; torch, eager and compiled with
freezing, ONNX Runtime and OpenVINO have processes of their own with one thread (the latter two need
pip install 'hires[peers]'). All compute the same network on the same images in turns, round by
round, and calibrate 8 bits on the same images. Each row says which kernels ran, and is wrong if one
of them reads another type than its precision (but for operators that the library only has in
float), or if it kept more cores busy than it has threads.
Exit codes: 0 done, 1 a row is wrong, 2 bad options.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from hires.bench.bench_output import OPTION, Benchmark, Result, Results
from hires.bench.kernel_types import onednn_kernels, ran_as
from hires.bench.layouts_bench import measure_peaks
from hires.bench.peer_process import PeerProcess
from hires.bench.precision_cases import (
    OURS,
    PrecisionCase,
    PrecisionOptions,
    cases_of,
    peers_of,
    row_name,
)
from hires.bench.precision_inputs import EXPECTED, Inputs, accuracy, make_inputs
from hires.bench.precision_table import NOTES, TILES, tables
from hires.bench.ranks import run_ranks, stream_ranks
from hires.bench.step_parts import LoggedSteps
from hires.bench.timing import Runner, Samples, race, ratios, spread
from hires.comm import make_groups
from hires.core.config.run_config import MeasureConfig
from hires.core.precisions import CPU_FLAGS
from hires.core.store.files import write_atomically
from hires.core.store.naming import plain
from hires.engine import arithmetic
from hires.engine.device import open_device
from hires.engine.memory_meter import give_back_memory, keep_memory
from hires.nets.trace import trace_config
from hires.plan.checks import EMULATED, lacks_instructions
from hires.plan.planner import make_plan

NUM_RANKS = 2
LEAST_DB = 20.0
"""Of outputs in fp32 over their error; zero or doubled outputs have 0. In fewer bits the error of a
network with drawn weights may be larger than they are, and `hires verify` bounds that of hires."""
MOST_CORES = 1.2
"""Cores that a row of one thread keeps busy, at most: threads of a library beside it do little."""
Row = dict[str, Any]

log = logging.getLogger(__name__)


def measure(options: PrecisionOptions) -> Results:
    """Yields the rows of all cases after each round, then with the memory of hires."""
    shown = {
        key: [*value] if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(options).items()
    }
    cases: dict[str, list[Row]] = {}
    for case in cases_of(options):
        with tempfile.TemporaryDirectory(prefix="hires-precision-") as place:
            log.info("%s: weights, images and scales", case.title)
            inputs = make_inputs(case, Path(place), options)
            for rows in _measured(case, options, inputs):
                cases[case.title] = rows
                yield result_of(shown, cases)


def result_of(options: dict[str, Any], cases: Mapping[str, list[Row]]) -> Result:
    """Returns all rows, and whether each ran the kernels of its precision."""
    ok = all(row["ok"] for rows in cases.values() for row in rows)
    lacks = [one for one in options["precisions"] if lacks_instructions(one)]
    return {"ok": ok, "options": options, "lacks": lacks, "cases": dict(cases)}


def facts_of(result: Result) -> list[str]:
    """Returns what the CPU lacks, which decides how fast its low precisions are."""
    return [f"no {', '.join(CPU_FLAGS[one])}: {EMULATED[one]}" for one in result.get("lacks", ())]


def _measured(
    case: PrecisionCase, options: PrecisionOptions, inputs: Inputs
) -> Iterator[list[Row]]:
    job = options.timeout, case, options, inputs
    rows: list[Row] = []
    for samples, facts in stream_ranks(run_case, NUM_RANKS, *job):
        rows = [_row(case, name, facts[name], samples.get(name)) for name in facts]
        yield rows
    for row in rows if options.memory else ():
        if row["who"] in OURS:
            config = case.config(row["precision"], OURS[row["who"]], inputs.weights, inputs.scales)
            config = dataclasses.replace(config, steps=3, measure=MeasureConfig(warmup=2))
            plan = make_plan(config, trace_config(config))
            peaks = run_ranks(measure_peaks, plan.world, options.timeout, config, plan)
            row["peak_bytes"] = max(peaks)
            yield rows


def _row(case: PrecisionCase, name: str, facts: dict[str, Any], samples: Samples | None) -> Row:
    row = {"name": name, "ok": True, "peak_bytes": None, **facts}
    if "not_run" not in facts and samples is not None:
        took = spread(samples.step_s)
        row |= {"step_s": took, "images_per_s": case.batch / took["median"]}
        row |= {"samples_s": samples.step_s, "cpu_samples_s": samples.cpu_s}
        row["cpu_s"] = spread(samples.cpu_s)["median"]
        row["cores"] = ratios(samples.cpu_s, samples.step_s)["median"]
        row["wrong"] = what_is_wrong(row)
        row["ok"] = not row["wrong"]
    return row


def what_is_wrong(row: Row) -> str:
    """Returns why a row is not what its name says; empty if it is."""
    if row["precision"] == "fp32" and not row["signal_db"] >= LEAST_DB:
        return f"outputs of another network: {row['signal_db']:.0f} dB over their error"
    if not ran_as(row["precision"], row["kernels"]):
        return f"kernels of another type than {row['precision']}"
    if row["cores"] > MOST_CORES * (NUM_RANKS if row["who"] == TILES else 1):
        return f"{row['cores']:.1f} cores"
    return ""


def run_case(
    rank: int, case: PrecisionCase, options: PrecisionOptions, inputs: Inputs
) -> Iterator[tuple[dict[str, Samples], dict[str, dict[str, Any]]]]:
    """Runs all rows of a case on one of two ranks; yields all samples and what each row is."""
    runners: dict[str, Runner | None] = {}
    facts: dict[str, dict[str, Any]] = {}
    expected = np.load(inputs.folder / EXPECTED)
    if options.trim:  # kept memory has gaps, which can double what a large step takes
        keep_memory(large=False)
    arithmetic.prepare(case.config("fp32", {}, "", ""), open_device("cpu", rank), rank)
    for precision in options.precisions:
        for who in OURS:
            name = row_name(who, precision)
            runners[name], found = _own(rank, who, precision, case, options, inputs, expected)
            facts[name] = {"who": who, "precision": precision, **found}
    for peer, precision in peers_of(options):
        name = row_name(peer, precision)
        runners[name] = None
        facts[name] = {"who": peer, "precision": precision}
        if rank == 0:
            log.info("%s: building", name)
            runners[name] = _peer(peer, precision, case, inputs, expected, facts[name])
        dist.barrier()
    for samples in race(runners, options.rounds, options.warmup, make_groups([[0, 1]])[0]):
        for name, runner in runners.items():
            if isinstance(runner, LoggedSteps):
                facts[name] |= runner.parts(len(samples[name].step_s))
            if isinstance(runner, PeerProcess):  # a step may have failed
                facts[name] |= runner.facts
        yield samples, facts
    for runner in runners.values():
        if isinstance(runner, PeerProcess):
            runner.close()


def _own(
    rank: int,
    who: str,
    precision: str,
    case: PrecisionCase,
    options: PrecisionOptions,
    inputs: Inputs,
    expected: Any,
) -> tuple[Runner | None, dict[str, Any]]:
    config = case.config(precision, OURS[who], inputs.weights, inputs.scales)
    plan = make_plan(config, trace_config(config))
    plan.require_ok()
    runner = LoggedSteps(config, plan, rank) if rank < plan.world else None
    outputs = None if runner is None else _step(runner, options.trim)
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, outputs)
    kernels: dict[str, int] = {}
    if runner is not None:
        runner.prepare()
        kernels = onednn_kernels(runner.step)
        runner.trims = options.trim
        runner.tidy()
    dist.barrier()
    whole = join_parts([part for part in parts if part is not None], expected.shape)
    return runner, {"kernels": kernels, **accuracy(whole, expected)}


def _step(runner: Runner, trims: bool) -> Any:
    runner.prepare()
    runner.step()  # measures which kernels are fast, which takes twice the memory of a step
    if trims:
        give_back_memory()
    outputs = runner.step()
    return None if outputs is None else outputs.float().numpy()


def join_parts(parts: list[Any], shape: tuple[int, ...]) -> Any:
    """Returns the outputs of all tiles as one array; each holds all of it, or some columns."""
    return parts[0] if parts[0].shape == shape else np.concatenate(parts, axis=-1)


def _peer(
    peer: str,
    precision: str,
    case: PrecisionCase,
    inputs: Inputs,
    expected: Any,
    facts: dict[str, Any],
) -> Runner | None:
    outputs = f"{peer} {precision}.npy"
    config = plain(case.config("fp32", {}, inputs.weights, ""))
    task = {"peer": peer, "precision": precision, "config": config, "outputs": outputs}
    runner = PeerProcess({**task, "folder": str(inputs.folder)})
    facts.update(runner.facts)
    if "not_run" in facts:
        return None
    facts.update(accuracy(np.load(inputs.folder / outputs), expected))
    return runner


def write_csv(folder: Path, result: Result) -> str:
    """Writes a line for each row of each case; returns what to print."""
    heads = ["case", "name", "images_per_s", "cpu_s", "peak_bytes", "agreement", "signal_db"]
    heads += ["kernels", "wrong", "not_run"]
    file = io.StringIO()
    lines = csv.DictWriter(file, heads, extrasaction="ignore", lineterminator="\n")
    lines.writeheader()
    for case, rows in result["cases"].items():
        lines.writerows({"case": case, **row} for row in rows)
    path = folder / "precision.csv"
    write_atomically(path, file.getvalue(), option=OPTION)
    return f"rows: {path}"


BENCHMARK = Benchmark(
    "precision",
    __doc__,
    PrecisionOptions,
    measure,
    tables,
    NOTES,
    facts=facts_of,
    finish=write_csv,
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
