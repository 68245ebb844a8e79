"""Checks all that needs a GPU in one command: ``hires bench gpu``, or ``scripts/gpu_check.py``.

It needs torch, numpy and safetensors, one GPU, no network and eight minutes. With ``--device cpu``
or ``simulated`` the script itself is rehearsed; what needs CUDA is then listed as not run.

    runs       copies of run folders that ``hires run --dry-run`` froze elsewhere (--runs)
    parity     every family of layouts in float64 against one process on the CPU
    resume     a run that begins on the CPU and ends on the device, and the other way round
    precision  every precision against float64, within its bound; int8 convolutions, and a network
               in tiles, against the CPU's, bit by bit; engines of TensorRT, where it is installed
    streams    NCCL's communicators and the executor's posts on them, one rank in place of all;
               halos, sums and images with and without overlap; the time line of events
    memory     predicted and measured, of every layout; what cuDNN holds beside the maps of a
               convolution, and MPI4DL's network whole and in tiles (the thesis's 87 GB)
    speed      three networks, 256 to 2048 pixels, beside plain torch

The first check of every section comes first, then the second ones, until the time is over; its last
part is for speed. What is left, or is not done at the end, is listed as not run. Exit codes: 0 all
passed, 1 a check failed, 2 bad options.

    hires bench gpu --out results/gpu/NAME             everything
    hires bench gpu --only speed --seconds 1800        more rows of speed
    hires run --dry-run device=cuda cluster.gpus=1 ...     where no GPU is, then here
    hires bench gpu --only runs --runs results/default/resnet50-224x224-single-fp32-0123abcd
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hires.bench import gpu_tensorrt
from hires.bench.bench_output import Benchmark, BenchTable, Result, Results
from hires.bench.device_name import device_name
from hires.bench.frozen_runs import check_folder, run_folders
from hires.bench.gpu_int8 import same_network, same_numbers
from hires.bench.gpu_options import PARTS, GpuOptions
from hires.bench.gpu_runs import (
    FAILED,
    FAMILIES,
    GRACE_S,
    NOT_RUN,
    OK,
    NotRunError,
    Runs,
    losses,
    memory_ratio,
    reserved_bytes,
    timed_share,
)
from hires.bench.gpu_speed import Speed, speed_table, speeds
from hires.bench.gpu_workspaces import workspace_share
from hires.bench.nccl_direct_check import nccl_direct_on_gpus
from hires.bench.nccl_posts import TIMEOUT_S, nccl_posts
from hires.core.config.quant_config import LINEAR
from hires.core.errors import HiresError, LateError
from hires.core.units import MIB
from hires.nets.custom import error_line

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
INT8_KERNELS = "int8 kernels"
INT8_NETWORK = "int8 in two tiles"
RESUMED = 1e-9
"""Largest relative difference of losses in float64 between devices."""
LEAST_TIMED = 0.5
"""Least share of a step's time that its time line shows."""
MEMORY = 1.1
"""Largest factor between predicted and measured memory."""
SPEED_SHARE = 0.3
"""Part of the time that is left for the section of speed, if others are asked for, too."""
LARGEST_WORKSPACE = 0.05
"""Largest workspace of cuDNN beside channels-last maps, of which the prediction has the weights."""

Row = dict[str, str]

REPEATABLE: dict[str, Any] = {
    # Without max pools, whose backward pass adds in any order on a GPU.
    "model": {"name": "mpi4dl_resnet", "n": 1, "classes": 10},
    "precision": {"name": "fp32"},
    "steps": 6,
}
"""What differs from ``BASE`` in runs that repeat bit by bit."""

log = logging.getLogger(__name__)


class PendingCheck(NamedTuple):
    """A check that has not been run."""

    section: str
    name: str
    run: Callable[[], tuple[bool, str]]
    """Returns whether it passed, and details."""


@dataclass
class GpuCheck:
    """What all sections share: where they run, and until when."""

    options: GpuOptions
    runs: Runs
    deadline_s: float
    longest_s: dict[str, float] = field(default_factory=dict)
    """Longest time of a check so far, by section: the next one is taken to last as long."""

    @property
    def device(self) -> str:
        """Kind of the device."""
        return self.options.device

    def row(self, section: str, name: str, check: Callable[[], tuple[bool, str]]) -> Row:
        """Returns the line of a check, which returns whether it passed, and details."""
        began_s = time.monotonic()
        try:
            if began_s + self.longest_s.get(section, 0.0) > self.deadline_s:
                raise NotRunError(f"no time is left of --seconds {self.options.seconds:g}")
            passed, details = check()
            state = OK if passed else FAILED
        except NotRunError as why:
            state, details = NOT_RUN, str(why)
        except HiresError as error:
            state, details = FAILED, " ".join(str(error).split())
            if isinstance(error, LateError) and time.monotonic() >= self.runs.ends_s:
                state = NOT_RUN
                details = f"not done when the time was over (--seconds {self.options.seconds:g})"
        except Exception as error:  # a fault of one check does not stop the others
            log.exception("%s, %s", section, name)
            state, details = FAILED, error_line(error)
        took_s = time.monotonic() - began_s
        self.longest_s[section] = max(took_s, self.longest_s.get(section, 0.0))
        log.info("%s, %s: %s, %s", section, name, state, details)
        return {
            "section": section,
            "check": name,
            "state": state,
            "details": details,
            "seconds": f"{took_s:.1f}",
        }


def measure(options: GpuOptions) -> Results:
    """Yields all rows so far, after every check."""
    result: Result = {"device": _device(options.device), "checks": [], "speed": [], "ok": True}
    timed = "speed" in options.only
    with tempfile.TemporaryDirectory(prefix="hires-gpu-") as folder:
        end_s = time.monotonic() + options.seconds
        speed_s = SPEED_SHARE * options.seconds if timed else 0.0
        runs = Runs(Path(folder), options.device, options.timeout, end_s + GRACE_S)
        check = GpuCheck(options, runs, end_s)
        # Their runs are stopped in time, so that speed has its part.
        early_runs = replace(runs, ends_s=runs.ends_s - speed_s)
        early = replace(check, runs=early_runs, deadline_s=end_s - speed_s)
        rows = (early.row(*one) for one in in_turn(early))
        for row in itertools.chain(rows, speed(check) if timed else ()):
            result["speed" if "network" in row else "checks"].append(row)
            result["ok"] = result["ok"] and not row["state"].startswith(FAILED)
            yield result


def in_turn(check: GpuCheck) -> Iterator[PendingCheck]:
    """Yields the first check of every section, then the second ones, and so on."""
    sections = [make(check) for name, make in SECTIONS.items() if name in check.options.only]
    for turn in itertools.zip_longest(*sections):
        yield from filter(None, turn)


def frozen(check: GpuCheck) -> Iterator[PendingCheck]:
    """Executes copies of the run folders that are named."""
    for folder in run_folders("--runs", check.options.runs):
        run = functools.partial(check_folder, check.runs, folder, MEMORY)
        yield PendingCheck("runs", folder.name, run)


def parity(check: GpuCheck) -> Iterator[PendingCheck]:
    """Compares every family of layouts with one process.

    All ranks of a layout share the one GPU, so their messages go through gloo.
    """
    for name in check.options.layouts:
        yield PendingCheck("parity", name, lambda name=name: _verified(check, FAMILIES[name]))  # type: ignore[misc]


def _verified(check: GpuCheck, *changes: dict[str, Any]) -> tuple[bool, str]:
    return check.runs.verify(check.runs.config("verify", *changes))


def resume(check: GpuCheck) -> Iterator[PendingCheck]:
    """Resumes a run on another kind of device than it began on."""
    for begins, ends in (("cpu", check.device), (check.device, "cpu")):
        name = f"{begins} to {ends}"
        yield PendingCheck("resume", name, lambda a=begins, b=ends: _resumed(check, a, b))  # type: ignore[misc]


def _resumed(check: GpuCheck, begins: str, ends: str) -> tuple[bool, str]:
    """Runs two of four steps on one device and the rest on another; all four on the first."""
    saving = {"parallel": {"tiles": [1, 2]}, "checkpoint": {"every": 2}, "steps": 2}
    campaign = f"{begins}-{ends}"
    half = check.runs.run(check.runs.config(campaign, saving, {"device": begins}))
    whole = check.runs.config(f"{campaign}-whole", saving, {"device": begins, "steps": 4})
    resuming = {"steps": 4, "checkpoint": {"resume": str(half.path)}, "device": ends}
    rest = check.runs.config(f"{campaign}-rest", saving, resuming)
    expected, got = losses(check.runs.run(whole)), losses(check.runs.run(rest))
    pairs = zip(got[-2:], expected[-2:], strict=True)
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    return worst <= RESUMED, f"losses of the other two steps differ by {worst:.1e}"


def precision(check: GpuCheck) -> Iterator[PendingCheck]:
    """Compares every precision with float64, in two tiles, and int8 with the CPU's, bit by bit.

    Engines of TensorRT are compared where Torch-TensorRT is installed.
    """
    for name in PRECISIONS:

        def compared(name: str = name) -> tuple[bool, str]:
            if name == "tf32" and check.device != "cuda":
                raise NotRunError("no CUDA")
            tiles = {"parallel": {"tiles": [1, 2]}, "precision": {"name": name}}
            return _verified(check, tiles)

        yield PendingCheck("precision", name, compared)

    def numbers() -> tuple[bool, str]:
        if check.device == "simulated":
            raise NotRunError("only ranks have tensors of the simulated device")
        return same_numbers(check.device)

    yield PendingCheck("precision", INT8_KERNELS, numbers)
    for linear in LINEAR:

        def network(linear: str = linear) -> tuple[bool, str]:
            return same_network(check.runs, linear)

        yield PendingCheck("precision", f"{INT8_NETWORK}, {linear} linear layers", network)
    for layout, name in itertools.product(gpu_tensorrt.LAYOUTS, gpu_tensorrt.PRECISIONS):

        def engines(layout: str = layout, name: str = name) -> tuple[bool, str]:
            return gpu_tensorrt.engines_of_layout(check.runs, layout, name)

        yield PendingCheck("precision", f"TensorRT, {name}, {layout}", engines)


def streams(check: GpuCheck) -> Iterator[PendingCheck]:
    """Runs NCCL in one process, and compares runs with and without overlap."""

    def posts() -> tuple[bool, str]:
        return nccl_posts(check.device, check.runs.left_s(TIMEOUT_S))

    yield PendingCheck("streams", "NCCL, one rank", posts)
    for num_ranks in (1, 2):

        def directly(num_ranks: int = num_ranks) -> tuple[bool, str]:
            if check.device != "cuda" or torch.cuda.device_count() < num_ranks:
                raise NotRunError(f"fewer than {num_ranks} GPUs")
            return nccl_direct_on_gpus(num_ranks, check.runs.left_s(TIMEOUT_S))

        yield PendingCheck("streams", f"NCCL called directly, ranks: {num_ranks}", directly)
    tiles, copies = {"parallel": {"tiles": [1, 2]}}, {"parallel": {"replicas": 2}}
    apart = {"parallel": {"tiles": [1, 2], "halo": {"overlap": "on"}}}
    yield PendingCheck("streams", "halos beside computation", lambda: _verified(check, apart))
    sums = [{**copies, "comm": {"shared_memory": shared}} for shared in (True, False)]
    yield PendingCheck("streams", "sums together or apart", lambda: _same(check, *sums))
    ahead = [{**tiles, "data": {"prefetch": number}} for number in (0, 2)]
    yield PendingCheck("streams", "images read ahead or not", lambda: _same(check, *ahead))

    def timed() -> tuple[bool, str]:
        run = check.runs.run(check.runs.config("timeline", REPEATABLE, tiles))
        share = timed_share(run)
        return LEAST_TIMED <= share <= 1.05, f"its spans are {share:.0%} of the steps on the clock"

    yield PendingCheck("streams", "time line of events", timed)


def _same(check: GpuCheck, *variants: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether runs that differ in overlap alone have the same losses."""

    def run(number: int, times: str = "") -> list[float]:
        config = check.runs.config(f"same-{number}{times}", REPEATABLE, variants[number])
        return losses(check.runs.run(config))

    first, *others = map(run, range(len(variants)))
    if all(other == first for other in others):
        return True, f"losses of {len(first)} steps are bitwise equal"
    repeats = "repeats" if run(0, "-again") == first else "does not repeat"
    return False, f"losses of {len(first)} steps differ; the first run {repeats} its own bits"


def memory(check: GpuCheck) -> Iterator[PendingCheck]:
    """Compares the predicted memory of every layout with what it needed."""
    # Two steps of warm-up: in the second of them the CPU's peak is measured, without what a
    # process keeps of freed memory.
    size = {"image": 256, "batch": 8, "precision": {"name": "fp32"}, "measure": {"warmup": 2}}
    for name in check.options.layouts:

        def compared(name: str = name) -> tuple[bool, str]:
            config = check.runs.config("memory", FAMILIES[name], size)
            if check.device == "simulated":
                raise NotRunError("memory of the simulated device is that of two devices")
            ratio = memory_ratio(check.runs.run(config, memory=True))
            details = f"predicted {ratio - 1:+.1%} of the measured peak"
            return 1 / MEMORY <= ratio <= MEMORY, details

        yield PendingCheck("memory", name, compared)
    yield from _thesis_memory(check)


def _thesis_memory(check: GpuCheck) -> Iterator[PendingCheck]:
    """Tests the readings of the thesis's 87 GB, on an image of a 256th of the pixels."""

    def workspace(in_hires: bool) -> tuple[bool, str]:
        if check.device != "cuda":
            raise NotRunError("no CUDA")
        share = workspace_share(in_hires)
        details = f"{share:.2f} of the input and output (1: copies, 7.2: columns, 0: neither)"
        return share <= LARGEST_WORKSPACE or not in_hires, details

    for ours, name in (
        (True, "channels last, as in hires"),
        (False, "channels first, as in MPI4DL"),
    ):
        title = f"cuDNN's workspace, {name}"
        yield PendingCheck("memory", title, lambda ours=ours: workspace(ours))  # type: ignore[misc]

    network = {"name": "mpi4dl_resnet", "n": 12, "classes": 10}
    size = {"model": network, "image": 512, "batch": 1, "precision": {"name": "fp32"}}
    for name in ("single", "sp grid"):

        def reserved(name: str = name) -> tuple[bool, str]:
            if check.device != "cuda":
                raise NotRunError("no CUDA")
            task = {"task": {"name": "infer"}}
            config = check.runs.config("reserved", FAMILIES[name], size, task)
            predicted, measured = reserved_bytes(check.runs.run(config, memory=True))
            ratio, total = predicted / measured, f"{measured / MIB:.0f} MiB of all ranks"
            return 1 / MEMORY <= ratio <= MEMORY, f"{total}, predicted {ratio - 1:+.1%}"

        yield PendingCheck("memory", f"MPI4DL's network reserves, {name}", reserved)


def speed(check: GpuCheck) -> Iterator[Row]:
    """Times three networks at several sizes, in every precision, beside plain torch."""
    try:
        sizes, tasks = tuple(check.options.images), check.options.tasks
        yield from speeds(Speed(check.device, sizes, tasks, check.deadline_s))
    except HiresError as error:
        # Also where the time is over by now.
        late = replace(check, deadline_s=math.inf)
        yield late.row("speed", "all rows", functools.partial(_failed, error))


def _failed(error: HiresError) -> tuple[bool, str]:
    raise error


SECTIONS: dict[str, Callable[[GpuCheck], Iterator[PendingCheck]]] = {
    "runs": frozen,
    "parity": parity,
    "precision": precision,
    "streams": streams,
    "memory": memory,
    "resume": resume,
}
"""Checks of every section but speed, which has an order of its own; the slowest ones last."""


def _facts(result: Result) -> list[str]:
    states = Counter(row["state"].partition(":")[0] for row in result["checks"] + result["speed"])
    listed = ", ".join(f"{count} {state}" for state, count in states.items())
    verdict = "no check failed" if result["ok"] else "AT LEAST ONE CHECK FAILED"
    return [f"device: {result['device']}", f"{verdict}: {listed or 'nothing was run'}"]


def _tables(result: Result) -> list[BenchTable]:
    checks = sorted(result["checks"], key=lambda row: PARTS.index(row["section"]))
    tables = [BenchTable("Checks on this device", checks)]
    if result["speed"]:
        tables.append(speed_table(result["speed"]))
    return [table for table in tables if table.rows]


def _device(kind: str) -> str:
    return device_name(kind) if kind != "cpu" else "cpu (a rehearsal: nothing of it ran on a GPU)"


BENCHMARK = Benchmark("gpu", __doc__, GpuOptions, measure, _tables, facts=_facts)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
