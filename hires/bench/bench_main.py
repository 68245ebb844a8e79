"""Measures the rows of a file, which ``hires bench`` has composed.

``python -m hires.bench.bench_main TASK`` plans all rows, starts ranks that hold all of them at
once, compares first steps with one process, and lets them run in turns. Exit codes: 0 done, 1 a
rank failed, a row is wrong or the device is missing, 2 bad options, 3 a layout cannot cut this
network and image.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hires.bench.bench_output import Benchmark, BenchTable, Result
from hires.bench.bench_rows import BenchRow, peer, planned, row_of, with_small
from hires.bench.bench_table import Measured, facts_of, measured_rows, row_not_run, row_table
from hires.bench.check import FirstStepCheck
from hires.bench.chosen_rows import choice_facts, chosen_rows, normalised
from hires.bench.kernel_types import ran_as
from hires.bench.precision_inputs import with_inputs
from hires.bench.race import Runner, Samples, race
from hires.bench.start_ranks import join_world, stream_ranks, torch_world
from hires.comm import make_groups
from hires.core.errors import HiresError
from hires.core.ranks import gpus
from hires.core.ranks.world import World
from hires.engine import arithmetic
from hires.engine.device import open_device
from hires.plan.hardware import require_gpus

RACE = "hires.bench.bench_main:run_race"
FEWEST_RANKS = 2
"""Of a world, so that rows of one and of two ranks have their turns in the same one."""

log = logging.getLogger(__name__)


def measure(task: dict[str, Any], previous: Result | None) -> Iterator[Result]:
    """Yields all rows by group after each round; groups that the folder holds are not repeated."""
    groups: dict[str, list[Measured]] = {}
    options = {key: task[key] for key in ("name", "rows", "rounds", "warmup")}
    if previous and previous["options"] == options:
        groups = {title: previous["groups"][title] for title in previous["done"]}
    done = [*groups]

    def result() -> Result:
        ok = all(row["ok"] for rows in groups.values() for row in rows)
        device = device_name(task["rows"][0]["config"]["device"])
        values = {"ok": ok, "device": device, "options": options, "done": done}
        return {**values, "groups": groups}

    for title in dict.fromkeys(row["title"] for row in task["rows"]):
        if title in done:
            log.info("%s is measured already; remove the folder to measure it again", title)
            continue
        log.info("%s", title)
        composed = [row for row in task["rows"] if row["title"] == title]
        try:
            for groups[title] in _measured(composed, task):
                yield result()
        except HiresError as error:
            if len(composed) > 1 or "choose" not in composed[0]:
                raise
            groups[title] = [{**failed_case(title), "not_run": str(error)}]
        done.append(title)
        yield result()


def failed_case(title: str) -> Measured:
    """Returns the row of a case that could not be measured; the reason is added."""
    values = {"what": "", "peer": "hires", "ranks": 0, "threads": 1, "images": 0}
    return {"name": title, **values, "predicted_s": None, "ok": False}


def _measured(composed: list[dict[str, Any]], task: dict[str, Any]) -> Iterator[list[Measured]]:
    if composed[0].get("choose"):
        rows = chosen_rows(composed[0], task["timeout"])
    else:
        rows = [row_of(row) for row in composed]
    require_gpus(rows[0].config)
    with tempfile.TemporaryDirectory(prefix="hires-bench-") as folder:
        if any(row.settings.get("statistics") for row in rows):
            rows = with_inputs(rows, Path(folder), task["timeout"])
        rows = [planned(replace(row, settings={**row.settings, "folder": folder})) for row in rows]
        idle = [row_not_run(row, row.lacks) for row in rows if row.lacks]
        finished: list[Measured] = []
        for group, num_ranks in races([row for row in rows if not row.lacks]):
            plain = [row.plain() for row in with_small(group)]
            job = plain, task["rounds"], task["warmup"], task["timeout"]
            for samples, facts in stream_ranks(RACE, num_ranks, task["timeout"], *job):
                stopped = {name for name in facts if facts[name].get("not_run")}
                timed = [row for row in group if row.name not in stopped]
                by_name = {name: Samples(*both) for name, both in samples.items()}
                latest = measured_rows(timed, by_name, facts)
                late = [
                    row_not_run(r, facts[r.name]["not_run"]) for r in group if r.name in stopped
                ]
                yield [*finished, *latest, *late, *idle]
            finished += [*latest, *late]
        if composed[0].get("choose"):
            normalised(finished)
        yield [*finished, *idle]


def races(rows: Sequence[BenchRow]) -> Iterator[tuple[list[BenchRow], int]]:
    """Yields the rows that can run in turns, and on how many ranks.

    Rows on more ranks than others have a race of their own beside the first row: every rank of a
    world takes part in every group that is made in it.
    """
    sizes = sorted({max(FEWEST_RANKS, row.ranks) for row in rows})
    for size in sizes:
        group = [row for row in rows if max(FEWEST_RANKS, row.ranks) == size]
        if size != sizes[0] and rows[0].ranks == 1:
            base = replace(rows[0], name=f"{rows[0].name}, beside {size} ranks")
            group = [replace(row, baseline=base.name, beside=()) for row in (base, *group)]
        yield group, size


def run_race(
    world: World, plain: list[dict[str, Any]], rounds: int, warmup: int, timeout_s: float
) -> Iterator[Any]:
    """Runs all rows on one rank; yields all samples, and what each row is, after each round."""
    rows = [BenchRow.of_plain(values) for values in plain]
    largest = max(rows, key=lambda row: row.ranks).config
    join_world(world, timeout_s, [largest.comm.backend], largest.device)
    torch_world(world, timeout_s)
    group = make_groups([[*range(world.size)]])[0]
    device = open_device(largest.device, world.local_rank)
    arithmetic.prepare(rows[0].config, device, world.rank)
    check = FirstStepCheck(world.rank, device)
    runners: dict[str, Runner | None] = {}
    facts: dict[str, dict[str, Any]] = {}
    for row in rows:
        log.info("%s: building and checking", row.name)
        facts[row.name] = {}
        runners[row.name] = runner = _built(row, world, device, facts[row.name])
        if facts[row.name].get("not_run"):
            continue
        deviation = check(row, runner)
        facts[row.name]["check"] = deviation and deviation.plain()
        if row.settings.get("kernels") and runner is not None:  # all ranks: a step has messages
            kernels = _kernels(runner)
            kind = row.config.precision.name
            wrong = "" if ran_as(kind, kernels) else f"kernels of another type than {kind}"
            facts[row.name] |= {"kernels": kernels, "wrong": wrong}
        torch.distributed.barrier()
    for samples in race(runners, rounds, warmup, group):
        yield samples, facts
    for runner in runners.values():
        if runner is not None:
            runner.close()


def _built(row: BenchRow, world: World, device: Any, facts: dict[str, Any]) -> Runner | None:
    # A library that fails to convert the network is no end of the others: its row says why.
    runner: Runner | None = None
    if world.rank < row.ranks:
        try:
            runner = peer(row.peer).build(row, world.rank, device)
            runner.threads, runner.device = row.threads, device
        except Exception as error:
            if not row.converted:
                raise
            facts["not_run"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if row.converted:
        told = [facts.get("not_run")]
        torch.distributed.broadcast_object_list(told)
        if told[0]:
            facts["not_run"] = told[0]
    return None if facts.get("not_run") else runner


def _kernels(runner: Runner) -> dict[str, int]:
    runner.before_step()
    counts = runner.kernels()
    runner.after_step()
    return counts


def device_name(kind: str) -> str:
    """Returns the kind of a device; of ``cuda`` the first GPU and the versions of its software."""
    if kind != "cuda":
        return kind
    gpu = torch.cuda.get_device_properties(0)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    software = f"driver {gpus.driver()}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {software}"


def tables(result: Result) -> list[BenchTable]:
    """Returns one table for each group."""
    return [row_table(title, rows) for title, rows in result["groups"].items() if rows]


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    return [*facts_of(result), *choice_facts(result)]


def main() -> int:
    """Measures what the file of the command line describes."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[1]).unlink()
    out = Path(task["out"]) if task["out"] else None
    measured = Benchmark(
        task["name"],
        task["command"],
        lambda previous: measure(task, previous),
        tables,
        task["notes"],
        facts,
    )
    return measured.run(out, as_json=task["json"])


if __name__ == "__main__":
    sys.exit(main())
