"""Measures the rows of a file, which ``hires bench`` has composed: layouts, precisions, choices.

All rows get plans, ranks that hold all of them at once are started, first steps are compared with
one process, and then the rows run in turns. A wrong row has no ratio, and none is taken beside it.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hires.bench.bench_main import Result, Row, result_of
from hires.bench.bench_rows import (
    PEERS,
    BenchRow,
    PeerSteps,
    in_float32,
    planned,
    row_of,
    with_small,
)
from hires.bench.check import FirstStepCheck, onednn_kernels, ran_as
from hires.bench.peers.peer_torch import calibration_images, plain_module
from hires.bench.race import Samples, race, ratios, spread
from hires.bench.start_ranks import join_world, stream_ranks
from hires.comm import gather_texts, make_groups
from hires.comm.backends import rendezvous
from hires.core.config.precision_config import INT8
from hires.core.errors import ConfigError, HiresError, LateError, RunError
from hires.core.programs import module_command
from hires.core.ranks.world import World
from hires.core.store import file_names
from hires.engine.device import RankDevice, open_device, prepare_arithmetic
from hires.plan.hardware import require_gpus
from hires.plan.route_choice import backends_of
from hires.plan.search.candidates import candidate_of
from hires.plan.simulation.machine_calibration import COMMAND, calibration_or_defaults

FEWEST_RANKS = 2
"""Of a world whose rows have one rank: most rows beside them have two."""
MOST_CORES = 1.2
"""Cores that a thread keeps busy, at most: threads of a library beside it do little."""
STATISTICS_PIXELS = 2**22
"""Of images whose statistics are computed at once, unless a batch has more: 4 of 1024x1024."""
REPLACED = ("weights", "results", "quant.images", "quant.calibration")
"""Keys of a calibration that :func:`with_inputs` sets."""
NEAR = 0.05  # a choice within so much of the best measured layout counts as right
log = logging.getLogger(__name__)


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows by group after each round; a case of a choice that fails ends no other."""
    kind = task["rows"][0]["config"]["device"]
    device = f"device: {torch.cuda.get_device_name(0) if kind == 'cuda' else kind}"
    groups: dict[str, list[Row]] = {}
    for title in dict.fromkeys(row["title"] for row in task["rows"]):
        composed = [row for row in task["rows"] if row["title"] == title]
        before = task.get("before", {}).get(title, [])
        known = [row for row in before if row.get("step_s", {}).get("count") == task["rounds"]]
        is_chosen = known and "choose" in composed[0]
        for rows in [known] if is_chosen else _measured(composed, task, known):
            groups[title] = rows
            yield result_of(groups, [device, *choice_facts(groups)])


def _measured(
    composed: Sequence[dict[str, Any]], task: Mapping[str, Any], known: Sequence[Row]
) -> Iterator[list[Row]]:
    log.info("%s", composed[0]["title"])
    try:
        yield from _raced(composed, task, known)
    except HiresError as error:
        if "choose" not in composed[0]:
            raise
        failed = BenchRow(composed[0]["title"], row_of(composed[0]).config)
        yield [{**not_run(failed, str(error)), "ok": False}]


def _raced(
    composed: Sequence[dict[str, Any]], task: Mapping[str, Any], known: Sequence[Row]
) -> Iterator[list[Row]]:
    timeout_s, choose = task["timeout"], "choose" in composed[0]
    rows = chosen_rows(composed[0], timeout_s) if choose else [row_of(row) for row in composed]
    require_gpus(rows[0].config)
    with tempfile.TemporaryDirectory(prefix="hires-bench-") as folder:
        rows = [replace(row, settings={**row.settings, "folder": folder}) for row in rows]
        rows = with_inputs(rows, composed[0]["words"], Path(folder), timeout_s)
        rows = [_with_plan(row, rows[0].name) for row in rows]
        idle = [not_run(row, row.lacks) for row in rows if row.lacks]
        done, worlds = [*known], worlds_of([row for row in rows if not row.lacks])
        if known or not worlds:
            yield [*done, *idle]
        for size, together in worlds.items():
            before, names = done, {row["name"] for row in done}
            if names.issuperset(row.name for row in together):
                continue
            job = with_small(together), task["rounds"], task["warmup"], timeout_s
            for samples, facts in stream_ranks(f"{__name__}:run_race", size, timeout_s, *job):
                found = measured_rows(together, samples, facts)
                done = before + [row for row in found if row["name"] not in names]
                yield [*done, *idle]


def _with_plan(row: BenchRow, first: str) -> BenchRow:
    try:
        row = replace(planned(row), baseline=row.baseline or first)
        PEERS[row.peer]  # or ConfigError: there is none
        return row
    except HiresError as error:
        raise type(error)(f"row {row.name!r}: {error}") from None


def with_inputs(
    rows: list[BenchRow], words: Sequence[str], folder: Path, timeout_s: float
) -> list[BenchRow]:
    """Returns rows with the weights and scales that are made for them; RunError: that failed.

    ``words`` are the overrides of the first row. A network without weights of its own gets first
    ones whose norms have the statistics of ``settings.statistics`` images, the most of any row, so
    that no value explodes. Rows without such images stay as they are.
    """
    count = max(row.settings.get("statistics", 0) for row in rows)
    if not count:
        return rows
    first = in_float32(rows[0].config)
    weights = first.weights
    if not weights:
        module, images = plain_module(first), calibration_images(first, count)
        at_once = max(first.batch, STATISTICS_PIXELS // (first.height * first.width))
        set_statistics(module, *torch.split(images, at_once))
        weights = str(folder / "weights.safetensors")
        save_file({name: t.contiguous() for name, t in module.state_dict().items()}, weights)
    scales = None
    if any(row.peer == "hires" and row.config.precision.name == INT8 for row in rows):
        scales = str(folder / file_names.SCALES)
        images_used = first.batch * -(-count // first.batch)
        usual = [word for word in words if word.partition("=")[0] not in REPLACED]
        usual += [f"weights={weights}", f"results={folder}", f"quant.images={images_used}"]
        usual += [] if first.data.path else ["quant.calibration=noise"]
        hires_output(["quantize", *usual, "--out", scales], timeout_s)
    filled = []
    for row in rows:
        config = replace(row.config, weights=weights)
        if config.precision.name == INT8:
            config = replace(config, quant=replace(config.quant, scales=scales))
        filled.append(replace(row, config=config, settings={**row.settings, "statistics": count}))
    return filled


@torch.no_grad()
def set_statistics(module: nn.Module, *pieces: Tensor) -> None:
    """Gives every batch norm the mean and variance of all pieces (n, C, H, W), one by one."""
    norms = [norm for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all pieces
    module.train()
    for images in pieces:
        module(images)
    module.eval()


def hires_output(words: Sequence[str], timeout_s: float) -> str:
    """Returns what a command of hires prints; RunError: it failed; LateError: it took too long."""
    what, command = f"`hires {' '.join(words)}`", module_command("hires", *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LateError(f"{what} was not done after {timeout_s:g} s; use --timeout") from None
    if done.returncode:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise RunError(f"{what} failed with code {done.returncode}: {last}")
    return done.stdout


def worlds_of(rows: Sequence[BenchRow]) -> dict[int, list[BenchRow]]:
    """Returns the rows that take turns in one world, by its number of ranks.

    Every rank takes part in every group of its world, so a row of several ranks needs one of its
    own size. Rows of one rank run in the first, and where they are a baseline.
    """
    sizes = sorted({row.ranks for row in rows if row.ranks > 1}) or [FEWEST_RANKS] * bool(rows)
    worlds: dict[int, list[BenchRow]] = {}
    for size in sizes:
        names = {r.name for r in rows if r.ranks == size or (r.ranks == 1 and size == sizes[0])}
        names |= {row.baseline for row in rows if row.name in names}
        worlds[size] = [r for r in rows if r.name in names and r.ranks in (1, size)]
    return worlds


def run_race(
    world: World, rows: list[BenchRow], rounds: int, warmup: int, timeout_s: float
) -> Iterator[Any]:
    """Runs all rows on one rank; yields all samples, and what each row is, after each round."""
    largest = max(rows, key=lambda row: row.ranks).config
    names = dict.fromkeys(name for row in rows for name in backends_of(row.config))
    join_world(world, timeout_s, [*{largest.comm.backend: None, **names}], largest.device)
    rendezvous.torch_world(world, timeout_s)
    group = make_groups([[*range(world.size)]])[0]
    device = open_device(largest.device, world.local_rank)
    prepare_arithmetic(rows[0].config, device, world.rank)
    check = FirstStepCheck(world.rank, device)
    runners: dict[str, PeerSteps | None] = {}
    facts: dict[str, Row] = {}
    for row in rows:
        log.info("%s: building and checking", row.name)
        runner, failure = _built(row, world, device)
        facts[row.name] = {"not_run": failure}
        if not failure:
            runners[row.name] = runner
            facts[row.name] = {"check": check(row, runner), **_kernels(row, runner)}
        torch.distributed.barrier()
    for number, samples in enumerate(race(runners, rounds, warmup, group)):
        log.info("round %d of %d", number + 1, rounds)
        yield samples, facts
    for built in filter(None, runners.values()):
        built.close()


def _kernels(row: BenchRow, runner: PeerSteps | None) -> Row:
    # Kernels of a row whose settings ask for them, if oneDNN lists them; all ranks take the step.
    if runner is None or not row.settings.get("kernels") or row.peer in ("onnxruntime", "openvino"):
        return {}
    runner.before_step()
    kernels, kind = onednn_kernels(runner.step), row.config.precision.name
    runner.after_step()
    wrong = "" if ran_as(kind, kernels) else f"kernels of another type than {kind}"
    return {"kernels": kernels, "wrong": wrong}


def _built(row: BenchRow, world: World, device: RankDevice) -> tuple[PeerSteps | None, str]:
    # A library that fails to convert the network is no end of the others: its row says why.
    runner, failure = None, ""
    if world.rank < row.ranks:
        try:
            runner = PEERS[row.peer](row, world.rank, device)
        except Exception as error:
            if not row.converted:
                raise
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    failure = next(filter(None, gather_texts(failure)), "")
    return None if failure else runner, failure


def measured_rows(
    rows: Sequence[BenchRow], samples: Mapping[str, Sequence[Any]], facts: Mapping[str, Row]
) -> list[Row]:
    """Returns each row with its speed and ratios.

    ``facts`` are those that ranks found: ``check``, ``kernels`` and ``wrong``, or ``not_run``.
    """
    measured = [
        _speed(row, Samples(*samples[row.name]), facts.get(row.name, {}))
        if row.name in samples
        else not_run(row, facts[row.name]["not_run"])
        for row in rows
    ]
    right = {row["name"]: row for row in measured if row["ok"] and "step_s" in row}
    for row, result in zip(rows, measured, strict=True):
        others = [right[name] for name in row.beside if name in right]
        best = min(others, key=lambda other: other["step_s"]["median"], default=None)
        base = right.get(row.baseline or rows[0].name)
        for ratio, name, other in (("speedup", "baseline", base), ("over_best", "best", best)):
            if row.name in right and other is not None:
                share = result["images"] / other["images"]
                result[ratio] = ratios(other["samples_s"], result["samples_s"], share)
                result[name] = other["name"]
    return measured


def not_run(row: BenchRow, why: str) -> Row:
    """Returns a row that cannot run here, with the reason."""
    return {**_plain(row), "ok": True, "not_run": why}


def _speed(row: BenchRow, samples: Samples, facts: Row) -> Row:
    samples_s, check = samples.rounds_s, facts.get("check")
    step_s, cores = spread(samples_s), ratios(samples.cpu_s, samples_s)["median"]
    wrong = [str(facts["wrong"])] if facts.get("wrong") else []
    if row.checked and check is None:
        wrong.append("it was not compared")
    elif check is not None and not check["ok"]:
        wrong.append("it computes something else")
    if row.config.device == "cpu" and cores > MOST_CORES * row.ranks * row.threads:
        wrong.append(f"it kept {cores:.1f} cores busy")
    speed = {"step_s": step_s, "images_per_s": row.config.batch / step_s["median"], "cores": cores}
    kept = {"samples_s": samples_s, "wrong": "; ".join(wrong), "ok": not wrong}
    return {**_plain(row), **facts, **speed, **kept}


def _plain(row: BenchRow) -> Row:
    names = "name", "what", "peer", "ranks", "threads", "predicted_s"
    return {**{name: getattr(row, name) for name in names}, "images": row.config.batch}


def chosen_rows(values: Mapping[str, Any], timeout_s: float) -> list[BenchRow]:
    """Returns the layouts of different shapes that a search lists for a case, fastest first.

    HiresError: there is no calibration, or the search fails.
    """
    config, words = row_of(values).config, values["words"]
    hires_output(["doctor", "--calibrate", *words, "--json"], timeout_s)  # the network's own layers
    if not calibration_or_defaults().is_measured:
        raise ConfigError(f"steps are predicted with a calibration of this machine: run {COMMAND}")
    choice = json.loads(hires_output(["plan", "--choose", *words, "--json"], timeout_s))
    rows: list[BenchRow] = []
    for option in of_different_shapes(choice["options"], values["choose"]):
        changed = candidate_of(option["keys"]).applied(config)
        name, what = f"{len(rows) + 1} {option['layout']}", option["overrides"]
        rows.append(BenchRow(name, changed, what=what, predicted_s=option["step_s"]))
    return rows


def of_different_shapes(options: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the first option, then the best of each shape, from the fastest to the slowest.

    Where there are more shapes than asked for, they are spread from the fastest to the slowest:
    layouts that differ much test the predicted order best.
    """
    shapes: dict[Any, dict[str, Any]] = {}
    for option in options:
        shapes.setdefault(candidate_of(option["keys"]).shape, dict(option))
    best = [*shapes.values()]
    if len(best) <= count:
        return best
    return [best[round(number * (len(best) - 1) / (count - 1))] for number in range(count)]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-a of some pairs of numbers; 1 for fewer than two pairs.

    Source:
        Kendall, "A new measure of rank correlation", Biometrika 30, 1938.
    """
    both = itertools.combinations(pairs, 2)
    signs = [float(np.sign((a[0] - b[0]) * (a[1] - b[1]))) for a, b in both]
    return statistics.mean(signs) if signs else 1.0


def choice_facts(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Returns how well all cases were predicted, to be quoted; nothing where none was chosen."""
    every = [
        [row for row in rows if row.get("step_s") and row["predicted_s"]]
        for rows in groups.values()
    ]
    cases = [[(row["predicted_s"], row["step_s"]["median"]) for row in rows] for rows in every]
    if not (cases := [case for case in cases if case]):
        return []
    errors = [abs(predicted / measured - 1) for case in cases for predicted, measured in case]
    right = [case[0][1] <= (1 + NEAR) * min(measured for _, measured in case) for case in cases]
    tau, count = statistics.mean(map(kendall_tau, cases)), f"{len(cases)} cases"
    return [
        f"mean error of a predicted step: {statistics.mean(errors):.1%}; {count}; "
        f"median {statistics.median(errors):.1%}",
        f"choices within {NEAR:.0%} of the best measured layout: {sum(right)} of {len(right)}; "
        f"{count}; mean of Kendall's tau {tau:.2f}",
    ]
