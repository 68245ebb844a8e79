"""Measures the rows of a file, which ``hires bench`` has composed: layouts, precisions, choices.

All rows get plans, ranks that hold all of them at once are started, first steps are compared with
one process, and then the rows run in turns.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hires.bench.bench_main import BenchTable, Result
from hires.bench.bench_rows import BenchRow, peer, planned, row_of, with_small
from hires.bench.bench_table import Measured, measured_rows, row_not_run, row_table
from hires.bench.check import FirstStepCheck
from hires.bench.chosen_rows import choice_facts, chosen_rows, normalised
from hires.bench.kernel_types import onednn_kernels, ran_as
from hires.bench.precision_inputs import with_inputs
from hires.bench.race import Runner, Samples, race
from hires.bench.start_ranks import join_world, stream_ranks, torch_world
from hires.comm import make_groups
from hires.core.errors import HiresError
from hires.core.ranks import gpus
from hires.core.ranks.world import World
from hires.engine import arithmetic
from hires.engine.device import RankDevice, open_device
from hires.plan.hardware import require_gpus
from hires.plan.route_choice import backends_of

FEWEST_RANKS = 2
"""Of a world, so that rows of one and of two ranks have their turns in the same one."""

log = logging.getLogger(__name__)


def measure(task: Mapping[str, Any], previous: Result | None) -> Iterator[Result]:
    """Yields all rows by group after each round; groups that the folder holds are not repeated."""
    groups: dict[str, list[Measured]] = {}
    if previous:
        groups = {title: previous["groups"][title] for title in previous["done"]}
    done = [*groups]

    def result() -> Result:
        ok = all(row["ok"] for rows in groups.values() for row in rows)
        device = device_name(task["rows"][0]["config"]["device"])
        return {"ok": ok, "device": device, "done": done, "groups": groups}

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
            values = {"what": "", "peer": "hires", "ranks": 0, "threads": 1, "images": 0}
            failed = {"name": title, **values, "predicted_s": None, "ok": False}
            groups[title] = [{**failed, "not_run": str(error)}]
        done.append(title)
        yield result()


def _measured(
    composed: Sequence[dict[str, Any]], task: Mapping[str, Any]
) -> Iterator[list[Measured]]:
    timeout_s, choose = task["timeout"], "choose" in composed[0]
    rows = chosen_rows(composed[0], timeout_s) if choose else [row_of(row) for row in composed]
    require_gpus(rows[0].config)
    with tempfile.TemporaryDirectory(prefix="hires-bench-") as folder:
        if any(row.settings.get("statistics") for row in rows):
            rows = with_inputs(rows, composed[0]["words"], Path(folder), timeout_s)
        rows = [planned(replace(row, settings={**row.settings, "folder": folder})) for row in rows]
        idle = [row_not_run(row, row.lacks) for row in rows if row.lacks]
        finished: list[Measured] = []
        for group, num_ranks in races([row for row in rows if not row.lacks]):
            plain = [row.plain() for row in with_small(group)]
            job = plain, task["rounds"], task["warmup"], timeout_s
            for samples, facts in stream_ranks(f"{__name__}:run_race", num_ranks, timeout_s, *job):
                stopped = {
                    name: facts[name]["not_run"] for name in facts if "not_run" in facts[name]
                }
                timed = [row for row in group if row.name not in stopped]
                by_name = {name: Samples(*both) for name, both in samples.items()}
                latest = measured_rows(timed, by_name, facts)
                latest += [row_not_run(r, stopped[r.name]) for r in group if r.name in stopped]
                yield [*finished, *latest, *idle]
            finished += latest
        if choose:
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
    names = dict.fromkeys(name for row in rows for name in backends_of(row.config))
    backends = [*dict.fromkeys([largest.comm.backend, *names])]
    join_world(world, timeout_s, backends, largest.device)
    torch_world(world, timeout_s)
    group = make_groups([[*range(world.size)]])[0]
    device = open_device(largest.device, world.local_rank)
    arithmetic.prepare(rows[0].config, device, world.rank)
    check = FirstStepCheck(world.rank, device)
    runners: dict[str, Runner | None] = {}
    facts: dict[str, dict[str, Any]] = {}
    for row in rows:
        log.info("%s: building and checking", row.name)
        runner, failure = _built(row, world, device)
        runners[row.name] = runner
        facts[row.name] = {"not_run": failure} if failure else {}
        if failure:
            continue
        deviation = check(row, runner)
        facts[row.name]["check"] = deviation and deviation.plain()
        if row.settings.get("kernels") and not row.listed_elsewhere and runner is not None:
            runner.before_step()  # on all ranks: a step has messages
            kernels = onednn_kernels(runner.step)
            runner.after_step()
            kind = row.config.precision.name
            wrong = "" if ran_as(kind, kernels) else f"kernels of another type than {kind}"
            facts[row.name] |= {"kernels": kernels, "wrong": wrong}
        torch.distributed.barrier()
    for samples in race(runners, rounds, warmup, group):
        yield samples, facts
    for built in runners.values():
        if built is not None:
            built.close()


def _built(row: BenchRow, world: World, device: RankDevice) -> tuple[Runner | None, str]:
    # A library that fails to convert the network is no end of the others: its row says why.
    runner, failure = None, ""
    if world.rank < row.ranks:
        try:
            runner = peer(row.peer).build(row, world.rank, device)
            runner.threads, runner.device = row.threads, device
        except Exception as error:
            if not row.converted:
                raise
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if row.converted:
        first = [failure]
        torch.distributed.broadcast_object_list(first)
        failure = first[0]
    return None if failure else runner, failure


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
    wrong = [row["name"] for rows in result["groups"].values() for row in rows if not row["ok"]]
    red = [f"WRONG: {', '.join(wrong)}"] if wrong else []
    return [f"device: {result['device']}", *red, *choice_facts(result)]
