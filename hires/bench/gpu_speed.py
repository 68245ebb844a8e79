"""Times networks on one device: hires and plain torch, eager and compiled, beside the roofline.

Each network, size and precision is timed in inference and training with a batch that fits the
device; a row that does not fit is marked. The roofline is measured on the spot: a large product in
each precision and a copy.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hires.bench.bench_output import BenchTable
from hires.bench.gpu_runs import FAILED, GRACE_S, NOT_RUN, OK
from hires.bench.gpu_steps import CONTESTANTS, MakeStep
from hires.bench.gpu_tensorrt import write_observed_scales
from hires.bench.ranks import stream_ranks
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import LateError
from hires.core.precisions import INT8
from hires.core.published import TABLE_2_1
from hires.core.ranks import compilers
from hires.engine.device import RankDevice, open_device
from hires.nets.custom import error_line
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.simulate import Network, simulate

NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet-101": {"name": "resnet", "depth": 101, "classes": 1000},
    "MPI4DL ResNet": {"name": "mpi4dl_resnet", "n": 12, "classes": 10},
    "AmoebaNet-D": {"name": "amoebanet", "layers": 18, "filters": 208, "classes": 1000},
}
PRECISIONS = ("fp32", "bf16", INT8, "tf32", "fp16")
PIXELS = {"infer": 64 * 256 * 256, "train": 16 * 256 * 256}
"""Of a batch, by task: in inference 64 images of 256x256, as in Table 2.1."""
STEPS, WARMUP = 5, 2
OURS = ("hires", "hires compiled")
COMPILED, COMPILED_FIRST = ("compiled", "hires compiled"), ("fp32", "bf16")
"""The contestants that compile, and the precisions in which they do so before larger sizes run."""
COMPILE_S = 60.0
"""Guess of a first row that compiles."""
LATE = "not run: time"
SMALL = 64
"""Pixels of a side of the images on which int8 scales are found."""
SIDE = 4096
"""Of the product whose speed is the roof."""

Row = dict[str, str]


@dataclass(frozen=True)
class Speed:
    """What is timed, and until when (``time.monotonic``)."""

    device: str
    images: tuple[int, ...]
    tasks: tuple[str, ...]
    deadline_s: float


class SpeedRow(NamedTuple):
    """What one row times."""

    image: int
    task: str
    precision: str
    network: str
    contestant: str


def rows_in_order(speed: Speed) -> list[SpeedRow]:
    """Returns all rows, the most telling ones first.

    At the first size eager torch and hires in every precision, then compiled; the other sizes; what
    else is compiled.
    """
    on_gpu = speed.device == "cuda"
    names = PRECISIONS if on_gpu else PRECISIONS[:3]
    contestants = [name for name in CONTESTANTS if on_gpu or name not in COMPILED]
    rows = itertools.product(speed.images, speed.tasks, names, NETWORKS, contestants)

    def priority(one: SpeedRow) -> int:
        compiled = one.contestant in COMPILED
        if one.image == speed.images[0]:
            return 0 if not compiled else 1 if one.precision in COMPILED_FIRST else 3
        return 3 if compiled else 2

    return sorted(filter(_exists, itertools.starmap(SpeedRow, rows)), key=priority)


def _exists(one: SpeedRow) -> bool:
    # Plain torch has no 8 bits on GPUs, and hires computes them in its own kernels.
    return one.precision != INT8 or (one.task, one.contestant) == ("infer", "hires")


def speeds(speed: Speed) -> Iterator[Row]:
    """Yields every row; those for which the time does not last are not run."""
    wanted, seen = rows_in_order(speed), 0
    left_s = speed.deadline_s - time.monotonic()
    if left_s > 0:
        # A process of its own holds the device: what it leaves behind ends with it.
        began_s = time.monotonic()
        try:
            for rows in stream_ranks(_rows, 1, left_s + GRACE_S, speed, wanted):
                yield from rows[seen:]
                seen, began_s = len(rows), time.monotonic()
        except LateError:
            if seen < len(wanted):
                took_s = time.monotonic() - began_s
                yield _left_out(wanted[seen], f"{NOT_RUN}: not done after {took_s:.0f} s")
            seen += 1
    yield from (_left_out(one, LATE) for one in wanted[seen:])


def speed_table(rows: list[Row]) -> BenchTable:
    """Returns the rows that were run as a table, with the number of the others below it."""
    late = Counter((row["task"], row["image"]) for row in rows if row["state"] == LATE)
    facts = [
        "share: of the roofline of measured products and copies. time line: of events on the "
        "device. thesis: Table 2.1, one A100."
    ]
    if late:
        counts = (f"{n} of {task} at {image} pixels" for (task, image), n in late.items())
        facts.append(f"Rows that were not run, since the time was over: {', '.join(counts)}.")
    run = [row for row in rows if row["state"] != LATE]
    return BenchTable("Images per second", run or rows[:1], fact=" ".join(facts))


def _rows(rank: int, speed: Speed, wanted: list[SpeedRow]) -> Iterator[list[Row]]:
    with tempfile.TemporaryDirectory(prefix="hires-scales-") as scales:
        yield from _rows_with(speed, wanted, Path(scales))


def _rows_with(speed: Speed, wanted: list[SpeedRow], scales: Path) -> Iterator[list[Row]]:
    device, rows = open_device(speed.device, 0), []
    # A row takes as long as that of another size: all sizes have as many pixels in a batch.
    longest_s: dict[tuple[str, ...], float] = {}
    for one in wanted:
        kind = one.task, one.network, one.contestant
        began_s = time.monotonic()
        guess_s = longest_s.get(kind, _longest_alike(longest_s, one))
        if began_s + guess_s > speed.deadline_s:
            rows.append(_left_out(one, LATE))
        else:
            rows.append(_row(device, speed.device, one, scales))
            longest_s[kind] = max(longest_s.get(kind, 0.0), time.monotonic() - began_s)
        yield rows
    yield rows


def _longest_alike(longest_s: dict[tuple[str, ...], float], one: SpeedRow) -> float:
    """Returns the longest time of a row that differs in its network, or a guess."""
    alike = (
        seconds
        for (task, _, contestant), seconds in longest_s.items()
        if (task, contestant) == (one.task, one.contestant)
    )
    return max(alike, default=COMPILE_S if one.contestant in COMPILED else 0.0)


def _row(device: RankDevice, kind: str, one: SpeedRow, scales: Path) -> Row:
    config = config_of(kind, one)
    compiles = one.contestant in COMPILED
    if compiles and (lacks := compilers.missing(kind)) is not None:
        return _left_out(one, f"{NOT_RUN}: {lacks}", config)
    device.set_tf32(one.precision == "tf32")
    # hires requires deterministic kernels; plain torch keeps its defaults.
    torch.backends.cudnn.deterministic = one.contestant in OURS
    device.reset_peak()
    try:
        if one.precision == INT8:
            config = _with_scales(config, one, scales)
        plan = make_plan(config, trace_config(config))
        with compiler_as_before() if compiles else contextlib.nullcontext():
            step_s, split = _timed(CONTESTANTS[one.contestant], config, plan, device)
    except torch.OutOfMemoryError:
        return _left_out(one, "no memory", config)
    except Exception as error:  # a row that fails does not stop the others
        state = FAILED if one.contestant in OURS else NOT_RUN
        return _left_out(one, f"{state}: {error_line(error)[:200]}", config)
    finally:
        gc.collect()  # an engine refers to itself
        if kind == "cuda":
            torch.cuda.empty_cache()
    peak = device.memory().get("peak_bytes", 0)
    least_s = simulate(plan, Roofline(plan, _roof(device, one.precision)), Network()).step_s
    published = TABLE_2_1.get(one.precision if one.precision != "tf32" else "fp32")
    same = (one.network, one.image, one.task) == ("MPI4DL ResNet", 256, "infer")
    beside = f"{published[1]:.2f}, {published[0]:.2f} GB" if same and published else "-"
    return _cells(one, config) | {
        "images/s": f"{config.batch / step_s:.2f}",
        "peak": f"{peak / 1e9:.2f} GB" if peak else "-",
        "share": f"{least_s / step_s:.0%}",
        "time line": split,
        "thesis": beside,
        "state": OK,
    }


@contextlib.contextmanager
def compiler_as_before() -> Iterator[None]:
    """Restores the compiler's options at the end, and drops what was compiled, which holds memory.

    hires sets options for the whole process; a contestant that compiles later has torch's own.
    """
    # Importing them costs seconds, and some rows compile nothing.
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    modules: list[Any] = [dynamo, functorch, inductor]
    before = [module.get_config_copy() for module in modules]
    try:
        yield
    finally:
        for module, options in zip(modules, before, strict=True):
            now = module.get_config_copy()
            module.load_config({name: was for name, was in options.items() if now[name] != was})
        torch.compiler.reset()


def _timed(
    make_step: MakeStep, config: RunConfig, plan: Plan, device: RankDevice
) -> tuple[float, str]:
    step = make_step(config, plan, device)
    try:
        return _median_s(device, step.run), step.split
    finally:
        step.close()


def _left_out(one: SpeedRow, state: str, config: RunConfig | None = None) -> Row:
    empty = dict.fromkeys(("images/s", "peak", "share", "time line", "thesis"), "-")
    return {**_cells(one, config), **empty, "state": state}


def _cells(one: SpeedRow, config: RunConfig | None) -> Row:
    batch = "-" if config is None else str(config.batch)
    place = {"task": one.task, "network": one.network, "image": str(one.image), "batch": batch}
    return {**place, "precision": one.precision, "contestant": one.contestant}


def config_of(kind: str, one: SpeedRow) -> RunConfig:
    """Returns the config of one row: a single rank."""
    pixels = PIXELS[one.task] if kind == "cuda" else 1
    batch = max(1, pixels // one.image**2)
    if one.task == "train" and kind != "cuda":
        batch = 2  # a norm of one pixel needs several images
    return from_dict(
        {
            "device": kind,
            "image": one.image,
            "batch": batch,
            "steps": 3,
            "engine": {"compile": "stage" if one.contestant == "hires compiled" else "off"},
            "model": NETWORKS[one.network],
            "data": {"length": batch, "classes": 10},
            "task": {"name": one.task},
            "precision": {"name": one.precision},
        }
    )


def _with_scales(config: RunConfig, one: SpeedRow, folder: Path) -> RunConfig:
    # Of small images: the speed does not depend on the scales.
    path = folder / f"{one.network}.json"
    if not path.exists():
        small = config_of("cpu", one._replace(image=SMALL, precision="fp32"))
        write_observed_scales(small, path)
    return replace(config, quant=replace(config.quant, scales=str(path)))


def _median_s(device: RankDevice, step: Callable[[], object]) -> float:
    taken = []
    for index in range(WARMUP + STEPS):
        device.synchronize()
        began_s = time.perf_counter()
        step()
        device.synchronize()
        if index >= WARMUP:
            taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


@functools.cache
def _roof(device: RankDevice, precision: str) -> Device:
    """Returns the speed of a large product in a precision, and that of a copy."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, INT8: torch.int8}
    low, side = types.get(precision, torch.float32), SIDE if device.memory() else SIDE // 8
    a = device.place(torch.randn(side, side).to(low))
    product = torch._int_mm if precision == INT8 else torch.matmul
    product_s = _median_s(device, lambda: product(a, a))
    copied = device.place(torch.empty(2 * side, 2 * side))
    target = torch.empty_like(copied)
    copy_s = _median_s(device, lambda: target.copy_(copied))
    return Device(2 * side**3 / product_s, 2 * copied.nbytes / copy_s, 0.0)
