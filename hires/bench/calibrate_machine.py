"""Measures this machine for predicted step times: ``hires doctor --calibrate``.

It runs small networks of many layers as ranks of a run do, one thread each: one rank alone, all
cores busy, and an image in tiles; it times every node of their passes, and messages between two
ranks. What it finds is kept in the user's cache, by machine and version; nothing is written before
all is measured. With keys of a network (model=unet image=256 batch=8) its own layers are added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hires.bench.bench_main import BenchTable, Result
from hires.bench.bench_rows import BenchRow
from hires.bench.calibration_chains import (
    CHAINS,
    MOST_TILES,
    Networks,
    Pace,
    own_networks,
    usual_networks,
)
from hires.bench.link_times import measure_links
from hires.bench.node_times import Key, NodeTimes, typical
from hires.bench.peers import peer_hires
from hires.bench.start_ranks import join_world, run_ranks, stream_ranks
from hires.comm import barrier, max_all
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.core.ranks.world import World
from hires.core.store import provenance
from hires.engine.device import RankDevice
from hires.plan.event import BYTES
from hires.plan.hardware import GLOO
from hires.plan.message_routes import joined_backends
from hires.plan.plan import Plan
from hires.plan.program import steps_of
from hires.plan.simulation.costs import BACK, UPDATE_TOUCHES, works_of
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

SECONDS = 50.0
"""For the steps that are timed, at the most."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 6
"""Timed steps of a network besides the first."""
PHASES = ("inference", "forward", "backward")
MOST_RANKS = 32
"""Of all cores busy: so many fill the memory's bandwidth."""
COPIED = 1 << 24
"""Elements of a copy that is larger than caches."""
log = logging.getLogger(__name__)

Measured = dict[str, Any]
"""What one rank found of one network: samples, and seconds of the parts of its steps."""


def measure(task: Mapping[str, Any], previous: Result | None) -> Iterator[Result]:
    """Yields the calibration once all of it is measured and kept.

    ``task["config"]`` is that of a network whose own layers are measured; None: of the machine
    alone.
    """
    begin_s = time.monotonic()

    def left_s() -> float:
        return max(1.0, float(task["timeout"]) - (time.monotonic() - begin_s))

    cores, kept = min(this_machine().cores, MOST_RANKS), None
    log.info("tracing the networks")
    own, usual = Networks([], []), Networks([], [])
    if task["config"] is not None:
        own = own_networks(from_dict(task["config"]))
        try:
            kept = load_calibration()
        except ConfigError as error:
            log.warning("%s: all of the machine is measured again", error)
    if kept is None:
        usual = usual_networks(range(len(CHAINS)), min(cores, MOST_TILES))
    networks = Networks(usual.whole + own.whole, usual.tiled + own.tiled)
    measured = _measured(networks, cores, task.get("seconds", SECONDS), left_s)
    if kept is None:
        log.info("measuring messages between two ranks")
        calibration = calibration_of(measured, measure_links(left_s()))
    else:
        calibration = with_network(kept, measured)
    path = keep_calibration(calibration)
    where = "nowhere: HIRES_CACHE=off" if path is None else str(path)
    seconds = round(time.monotonic() - begin_s, 1)
    yield {"calibration": calibration.to_dict(), "kept": where, "seconds": seconds}


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
    pace_s, busy_pace_s = (
        statistics.median([one["pace_step_s"] for one in ones]) for ones in (alone, busy)
    )
    samples = samples_of(measured, pace_s, busy_pace_s)
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
    memory, busy_memory = (
        1 / typical([1 / one["bytes_per_s"] for one in ones]) for ones in (alone, busy)
    )
    when, speeds = provenance.now(), (rates, memory, busy_memory, links, overheads)
    return Calibration(this_machine(), when, samples, *speeds, pace_s, busy_pace_s)


def _amount(work: NodeWork) -> float:
    """Returns the operations of arithmetic, or the bytes of other work."""
    amount = work.flops if work.family in ARITHMETIC else work.num_bytes
    return amount * (BACK if work.back and work.input_grad else 1)


def _measured(
    networks: Networks, cores: int, seconds: float, left_s: Callable[[], float]
) -> list[Measured]:
    """Returns what a rank finds of each network: alone, with all cores busy, and in tiles."""
    measured: list[Measured] = []
    share = len(networks.whole) * min(cores, 2)
    share_s = seconds / max(1, share + len(networks.tiled))
    log.info("measuring operators of one rank, alone and with all %d cores busy", cores)
    whole = [network.plain() for network in networks.whole]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flag = str(Path(folder, "busy"))
        if cores > 1:
            others = f"{__name__}:generate_load", cores - 1, left_s(), whole, flag, left_s()
            load = stack.enter_context(contextlib.closing(stream_ranks(*others)))  # type: ignore
            next(load)
        words = whole, share * share_s, 1, flag if cores > 1 else "", cores, left_s()
        measured += run_ranks(f"{__name__}:time_networks", 1, left_s(), *words)
    for ranks in sorted({row.ranks for row in networks.tiled}):
        log.info("measuring operators of images in %d tiles", ranks)
        alike = [row.plain() for row in networks.tiled if row.ranks == ranks]
        words = alike, len(alike) * share_s, cores, "", cores, left_s()
        measured += run_ranks(f"{__name__}:time_networks", ranks, left_s(), *words)
    for one in measured:
        one["samples"] = [Sample(_work(work), n, seconds) for work, n, seconds in one["samples"]]
    return measured


def _work(values: Sequence[Any]) -> NodeWork:
    return NodeWork._make(tuple(value) if isinstance(value, list) else value for value in values)


def generate_load(
    world: World, networks: list[dict[str, Any]], flag: str, timeout_s: float
) -> Iterator[bool]:
    """Computes steps of the network whose number a file holds, until this rank is killed.

    So it takes as much of the caches and the memory as the ranks of a layout, which do the same.
    """
    join_world(world, timeout_s)
    # Each by itself: a plan of one rank has no message.
    rows = map(BenchRow.of_plain, networks)
    runners = [peer_hires.build(row, 0, RankDevice()) for row in rows]
    for runner in runners:
        runner.before_step()
        runner.step()
    barrier()
    yield True
    while True:
        number = number_in(Path(flag))
        if number is None:
            time.sleep(0.01)
            continue
        runners[number].before_step()
        runners[number].step()


def number_in(file: Path) -> int | None:
    """Returns the number that a file holds; None: there is no file, or no number in it yet."""
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def time_networks(
    world: World,
    networks: list[dict[str, Any]],
    budget_s: float,
    ranks: int,
    flag: str,
    cores: int,
    timeout_s: float,
) -> Iterator[list[Measured]]:
    """Yields what a rank takes for each network, alone and while a file makes others compute it.

    The networks take turns, each step between others that show the machine's pace at that moment.
    All ranks of a plan take equally many steps.
    """
    every = [BenchRow.of_plain(network) for network in networks]
    plans = [row.plan for row in every if row.plan is not None]
    names = dict.fromkeys(name for plan in plans for name in joined_backends(plan))
    join_world(world, timeout_s, [*dict.fromkeys([GLOO, *names])])
    steps = [peer_hires.build(row, world.rank, RankDevice()) for row in every]
    for _ in range(2):  # the first prepares kernels, the second shows how long a round takes
        first = [NodeTimes(one) for one in steps]
        for one in first:
            one.step()
    pace = Pace()
    round_s = sum(one.step_s[0] + pace.step() for one in first) * (2 if flag else 1)
    rounds = max_all(max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_s / round_s))))
    phases = (False, True) if flag else (False,)
    times = {busy: [NodeTimes(one) for one in steps] for busy in phases}
    for number in range(rounds):
        log.info("round %d of %d", number + 1, rounds)
        for busy, ones in times.items():
            _time_round(ones, pace, Path(flag) if busy else None)
    yield [
        _parts_of(one, row, world.rank, cores if busy else ranks)
        for busy, ones in times.items()
        for one, row in zip(ones, every, strict=True)
    ]


def _time_round(times: list[NodeTimes], pace: Pace, flag: Path | None) -> None:
    """Takes one step of each network; the file ``flag`` makes other ranks compute the same."""
    if flag is not None:
        flag.write_text("0")
    pace.step()  # meanwhile the other cores begin, or end what they compute
    paces_s = [pace.step()]
    for index, one in enumerate(times):
        if flag is not None:
            flag.write_text(str(index))
        one.step()
        paces_s.append(pace.step())
    for index, one in enumerate(times):  # two before its step, and two after it
        one.pace_s.append(statistics.median(paces_s[max(0, index - 1) : index + 3]))
    if flag is not None:
        flag.unlink()


def _parts_of(times: NodeTimes, row: BenchRow, rank: int, ranks: int) -> Measured:
    """Returns the samples of a rank's steps, and the parts of a step."""
    assert row.plan is not None
    plan = row.plan
    medians, works = times.medians(), _works(plan, rank)
    equal: dict[NodeWork, list[float]] = defaultdict(list)  # one sample for each work
    for key, work in works.items():
        if medians.get(key):
            equal[work].append(medians[key])
    passes_s, update_s = typical(times.passes_s), typical(times.update_s)
    params = sum(stage.params for stage in plan.stages) if plan.training else 0
    touched = (UPDATE_TOUCHES + 2 * plan.optimizer_states) * params * BYTES["float32"]
    nodes_s = sum(medians.values())
    return {
        "ranks": ranks,
        "pace_step_s": statistics.median(times.pace_s),
        "samples": [[[*work], ranks, typical(all_s)] for work, all_s in equal.items()],
        "pass_s": passes_s / len(plan.actions_of(rank)),
        "besides_s": max(0.0, typical(times.step_s) - nodes_s - passes_s - update_s),
        "update_s": update_s,
        "update_bytes": touched,
        "bytes_per_s": _bandwidth(),
    }


def _works(plan: Plan, rank: int) -> dict[Key, NodeWork]:
    """Returns what the passes of a rank's first slot ask for, by node and pass."""
    works: dict[Key, NodeWork] = {}
    slot = plan.slot_of(rank, 0)
    stage = plan.stages[slot.stage]
    for back in (False, True) if plan.training else (False,):
        steps = steps_of(plan, stage, back)
        for step, work in zip(steps, works_of(plan, stage, slot.tile, back), strict=True):
            if work is not None:
                works[step.node.name, step.back] = work
    return works


def _bandwidth() -> float:
    source, target = torch.ones(COPIED), torch.empty(COPIED)
    rates = []
    for _ in range(3):
        begin_s = time.thread_time()
        target.copy_(source)
        rates.append(2 * 4 * COPIED / (time.thread_time() - begin_s))
    return max(rates)


def tables(result: Result) -> list[BenchTable]:
    """Returns the speed of operators by class, and the links."""
    calibration = calibration_from(result["calibration"])
    by_class: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work, ranks, seconds in calibration.samples:
        heading = work.phase + (", busy" if ranks > 1 else "")
        by_class[work.family, work.dtype][heading].append(_amount(work) / seconds / 1e9)
    rows = []
    for (family, dtype), rates in sorted(by_class.items()):
        unit = "GFLOP/s" if family in ARITHMETIC else "GB/s"
        speeds = {
            heading: f"{statistics.median(rates[heading]):.3g}" if heading in rates else "-"
            for heading in (f"{phase}{end}" for end in ("", ", busy") for phase in PHASES)
        }
        rows.append({"operators": family, "type": dtype, "unit": unit, **speeds})
    links, memory = calibration.links, calibration.bytes_per_s / 1e9
    note = (
        f"Medians over sizes, one core; busy: all cores compute. Memory: {memory:.1f} GB/s of a "
        f"core alone, {calibration.busy_bytes_per_s / 1e9:.1f} GB/s of each of all cores.\n"
        f"Links between two ranks: {links.latency_s * 1e6:.0f} us, "
        f"{links.bytes_per_s / 1e9:.2f} GB/s; a small gather {links.gather_s * 1e6:.0f} us; sums "
        f"of gradients {links.reduce_bytes_per_s / 1e9:.2f} GB/s.\n"
        f"Kept: {result['kept']}, after {result['seconds']:.0f} s."
    )
    return [BenchTable("Operators on this machine", rows, note)]


def facts(result: Result) -> list[str]:
    """Returns what stands above the table."""
    return []
