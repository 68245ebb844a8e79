"""Measures this machine for predicted step times: ``hires doctor --calibrate``.

It runs small networks of many layers as ranks of a run do, one thread each: one rank alone, all
cores busy, and an image in tiles; it times every node of their passes, and messages between two
ranks. What it finds is kept in the user's cache, by machine and version; nothing is written before
all is measured. With keys of a network (model=unet image=256 batch=8) its own layers are added.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hires.bench.bench_rows import BenchRow
from hires.bench.bench_tables import BenchTable, Result
from hires.bench.calibration_chains import (
    CHAINS,
    MOST_TILES,
    own_networks,
    pace_row,
    usual_networks,
)
from hires.bench.calibration_times import typical
from hires.bench.start_ranks import run_ranks
from hires.core.config.fields import build
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.store import provenance
from hires.plan.simulation.costs import BACK
from hires.plan.simulation.machine_calibration import (
    Calibration,
    Links,
    Overheads,
    Sample,
    calibration_from,
    keep_calibration,
    load_calibration,
    this_machine,
)
from hires.plan.simulation.node_work import ARITHMETIC, NodeWork

SECONDS = 50.0  # for the steps that are timed, at the most
PHASES = ("inference", "forward", "backward")
MOST_RANKS = 32  # of all cores busy: so many fill the memory's bandwidth
JOBS = "hires.bench.calibration_times"
log = logging.getLogger(__name__)

Measured = dict[str, Any]
"""What one rank found of one network: samples, and seconds of the parts of its steps."""


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields the calibration once all of it is measured and kept.

    ``task["config"]`` is that of a network whose own layers are measured; None: of the machine
    alone.
    """
    begin_s = time.monotonic()

    def left_s() -> float:
        return max(1.0, float(task["timeout"]) - (time.monotonic() - begin_s))

    cores, kept = min(this_machine().cores, MOST_RANKS), None
    log.info("tracing the networks")
    networks: list[BenchRow] = []
    if task["config"] is not None:
        networks = own_networks(from_dict(task["config"]))
        try:
            kept = load_calibration()
        except ConfigError as error:
            log.warning("%s: all of the machine is measured again", error)
    if kept is None:
        networks += usual_networks(range(len(CHAINS)), min(cores, MOST_TILES))
    measured = _measured(networks, cores, task.get("seconds", SECONDS), left_s)
    if kept is None:
        log.info("measuring messages between two ranks")
        links = Links(*run_ranks(f"{JOBS}:time_links", 2, left_s(), left_s()))
        calibration = calibration_of(measured, links)
    else:
        calibration = with_network(kept, measured)
    path = keep_calibration(calibration)
    where = "nowhere: HIRES_CACHE=off" if path is None else str(path)
    seconds = round(time.monotonic() - begin_s, 1)
    yield {"calibration": calibration.to_dict(), "kept": where, "seconds": seconds}


def _measured(
    networks: list[BenchRow], cores: int, seconds: float, left_s: Callable[[], float]
) -> list[Measured]:
    # What a rank finds of each network: alone, with all cores busy, and in tiles.
    by_ranks = {n: [row for row in networks if row.ranks == n] for n in range(1, MOST_TILES + 1)}
    jobs = [(by_ranks[1], ranks, ranks) for ranks in sorted({1, cores})]
    jobs += [(rows, ranks, cores) for ranks, rows in by_ranks.items() if ranks > 1 and rows]
    measured: list[Measured] = []
    share_s = seconds / max(1, sum(len(rows) for rows, _, _ in jobs))
    for rows, ranks, busy in jobs:
        log.info("measuring operators of %d networks, %d ranks", len(rows), ranks)
        plain = [row.plain() for row in (pace_row(), *rows)]
        words = plain, len(rows) * share_s, busy, left_s()
        measured += run_ranks(f"{JOBS}:time_networks", ranks, left_s(), *words)
    for one in measured:
        one["samples"] = [build(Sample, sample) for sample in one["samples"]]
    return measured


def with_network(kept: Calibration, measured: list[Measured]) -> Calibration:
    """Returns a calibration with the samples of another network; what else is in it stays."""
    new = samples_of(measured, kept.pace_s, kept.busy_pace_s)
    replaced = {(one.work, one.ranks > 1) for one in new}
    others = [one for one in kept.samples if (one.work, one.ranks > 1) not in replaced]
    return dataclasses.replace(kept, network_time=provenance.now(), samples=[*others, *new])


def samples_of(measured: list[Measured], pace_s: float, busy_pace_s: float) -> list[Sample]:
    """Returns all samples as they would be at one pace: seconds of a step that shows it."""
    samples = []
    for one in measured:
        factor = (busy_pace_s if one["ranks"] > 1 else pace_s) / one["pace_step_s"]
        samples += [Sample(w, ranks, factor * seconds) for w, ranks, seconds in one["samples"]]
    return samples


def calibration_of(measured: list[Measured], links: Links) -> Calibration:
    """Returns what follows from the measured networks."""
    alone = [one for one in measured if one["ranks"] == 1]
    busy = [one for one in measured if one["ranks"] > 1] or alone
    paces = [statistics.median(one["pace_step_s"] for one in ones) for ones in (alone, busy)]
    samples = samples_of(measured, *paces)
    rates: dict[str, float] = {}
    for work, _, seconds in samples:
        if work.family in ARITHMETIC:
            rates[work.dtype] = max(rates.get(work.dtype, 0.0), _amount(work) / seconds)
    updates = [one for one in alone if one["update_s"]]
    overheads = Overheads(
        launch_s=min(sample.seconds for sample in samples),
        pass_s=typical([one["pass_s"] for one in alone]),
        step_s=typical([one["besides_s"] for one in alone]),
        update_bytes_per_s=sum(one["update_bytes"] for one in updates)
        / max(1e-9, sum(one["update_s"] for one in updates)),
    )
    memory = [1 / typical([1 / one["bytes_per_s"] for one in ones]) for ones in (alone, busy)]
    speeds = rates, *memory, links, overheads, *paces
    return Calibration(this_machine(), provenance.now(), samples, *speeds)


def _amount(work: NodeWork) -> float:
    # Operations of arithmetic, or bytes of other work.
    amount = work.flops if work.family in ARITHMETIC else work.num_bytes
    return amount * (BACK if work.back and work.input_grad else 1)


def tables(result: Result) -> list[BenchTable]:
    """Returns the speed of operators by class, and the links."""
    calibration = calibration_from(result["calibration"])
    phases = [f"{phase}{end}" for end in ("", ", busy") for phase in PHASES]
    rates: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work, ranks, seconds in calibration.samples:
        phase = work.phase + ", busy" * (ranks > 1)
        rates[work.family, work.dtype][phase].append(_amount(work) / seconds / 1e9)
    rows = []
    for (family, dtype), found in sorted(rates.items()):
        unit = "GFLOP/s" if family in ARITHMETIC else "GB/s"
        speeds = {n: f"{statistics.median(found[n]):.3g}" if n in found else "-" for n in phases}
        rows.append({"operators": family, "type": dtype, "unit": unit, **speeds})
    links, gigas = calibration.links, [calibration.bytes_per_s, calibration.busy_bytes_per_s]
    gigas += [links.bytes_per_s, links.reduce_bytes_per_s]
    alone, busy, link, sums = (f"{rate / 1e9:.2f} GB/s" for rate in gigas)
    note = (
        f"Medians over sizes, one core; busy: all cores compute. Memory: {alone} of a core alone, "
        f"{busy} of each of all cores.\nLinks between two ranks: {links.latency_s * 1e6:.0f} us, "
        f"{link}; a small gather {links.gather_s * 1e6:.0f} us; sums of gradients {sums}.\n"
        f"Kept: {result['kept']}, after {result['seconds']:.0f} s."
    )
    return [BenchTable("Operators on this machine", rows, note)]
