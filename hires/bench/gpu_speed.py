"""Times networks on one device: hires beside plain torch, eager and compiled, and the roofline.

Each network, size and precision is timed in inference with a batch that fits the device; what does
not fit is skipped. The roofline is measured on the spot: a large product in each precision and a
copy.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hires.bench.bench_output import BenchTable
from hires.bench.published import TABLE_2_1
from hires.bench.ranks import stream_ranks
from hires.core.config.run_config import RunConfig, from_dict
from hires.engine.build import build_rank, whole_model
from hires.engine.device import RankDevice, open_device
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
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PIXELS = 64 * 256 * 256
"""Of a batch: 64 images of 256x256, as in Table 2.1."""
STEPS, WARMUP = 5, 2
COMPILED = ("fp32", "bf16")
"""Precisions in which torch compiles, at the smallest size only: it takes half a minute each."""
SIDE = 4096
"""Of the product whose speed is the roof."""

Row = dict[str, str]


@dataclass(frozen=True)
class Speed:
    """What is timed, and until when (``time.monotonic``)."""

    device: str
    images: tuple[int, ...]
    deadline_s: float


def speeds(speed: Speed) -> Iterator[Row]:
    """Yields a row for each network, size, precision and way, until the time is over."""
    left_s = speed.deadline_s - time.monotonic()
    if left_s <= 0:
        return
    seen = 0
    # A process of its own holds the device: what it leaves behind ends with it.
    for rows in stream_ranks(_rows, 1, left_s + 60, speed):
        yield from rows[seen:]
        seen = len(rows)


def speed_table(rows: list[Row]) -> BenchTable:
    """Returns the rows as a table."""
    return BenchTable(
        "Images per second in inference",
        rows,
        fact="share: of the roofline of measured products and copies. thesis: Table 2.1, one A100.",
    )


def _rows(rank: int, speed: Speed) -> Iterator[list[Row]]:
    device, rows = open_device(speed.device, 0), []
    on_gpu = speed.device == "cuda"
    names = PRECISIONS if on_gpu else ("fp32", "bf16")
    ways = ("eager", "hires")
    asked = [*itertools.product(speed.images, NETWORKS, names, ways)]
    if on_gpu:
        asked += itertools.product(speed.images[:1], NETWORKS, COMPILED, ("compiled",))
    for image, network, precision, way in asked:
        if time.monotonic() > speed.deadline_s:
            break
        rows.append(_row(device, speed.device, network, image, precision, way))
        yield rows
    yield rows


def _row(device: RankDevice, kind: str, network: str, image: int, precision: str, way: str) -> Row:
    batch = max(1, PIXELS // image**2) if kind == "cuda" else 1
    config = config_of(kind, network, image, batch, precision)
    row = {"network": network, "image": str(image), "batch": str(batch), "precision": precision}
    row |= {"way": way}
    device.set_tf32(precision == "tf32")
    device.reset_peak()
    try:
        plan = make_plan(config, trace_config(config))
        step_s = _median_s(device, WAYS[way](config, plan, device))
    except torch.OutOfMemoryError:
        return {**row, "images/s": "no memory", "peak": "-", "share": "-", "thesis": "-"}
    finally:
        if kind == "cuda":
            torch.cuda.empty_cache()
    roof = _roof(device, precision)
    least_s = simulate(plan, Roofline(plan, roof), Network()).step_s
    peak = device.memory().get("peak_bytes", 0)
    published = TABLE_2_1.get(precision if precision != "tf32" else "fp32")
    beside = network == "MPI4DL ResNet" and image == 256 and published
    return {
        **row,
        "images/s": f"{batch / step_s:.2f}",
        "peak": f"{peak / 1e9:.2f} GB" if peak else "-",
        "share": f"{least_s / step_s:.0%}",
        "thesis": f"{published[1]:.2f}, {published[0]:.2f} GB" if beside and published else "-",
    }


def config_of(kind: str, network: str, image: int, batch: int, precision: str) -> RunConfig:
    """Returns the config of one row: a single rank in inference."""
    return from_dict(
        {
            "device": kind,
            "image": image,
            "batch": batch,
            "steps": 3,
            "model": NETWORKS[network],
            "data": {"length": batch, "classes": 10},
            "task": {"name": "infer"},
            "precision": {"name": precision},
        }
    )


def _hires(config: RunConfig, plan: Plan, device: RankDevice) -> Callable[[], object]:
    engine = build_rank(config, plan, 0, 1)
    feed = [itertools.cycle([*loader]) for loader in engine.loaders]
    return lambda: engine.executor.step(feed)


def _eager(config: RunConfig, plan: Plan, device: RankDevice) -> Callable[[], object]:
    return _plain(config, device, whole_model(config))


def _compiled(config: RunConfig, plan: Plan, device: RankDevice) -> Callable[[], object]:
    return _plain(config, device, torch.compile(whole_model(config)))  # type: ignore[arg-type]


def _plain(config: RunConfig, device: RankDevice, model: nn.Module) -> Callable[[], object]:
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision.name)
    model = device.place_module(model.eval())
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if low is not None:
        model = model.to(low)
    shape = (config.batch, config.model.channels, config.height, config.width)
    images = torch.randn(shape, dtype=low).contiguous(memory_format=torch.channels_last)
    placed = device.place(images)

    def step() -> Tensor:
        with torch.inference_mode():
            return model(placed)  # type: ignore[no-any-return]

    return step


WAYS: dict[str, Callable[[RunConfig, Plan, RankDevice], Callable[[], object]]] = {
    "eager": _eager,
    "compiled": _compiled,
    "hires": _hires,
}


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
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side = SIDE if device.memory() else SIDE // 8
    a = device.place(torch.randn(side, side, dtype=low))
    product_s = _median_s(device, lambda: a @ a)
    copied = device.place(torch.empty(2 * side, 2 * side))
    target = torch.empty_like(copied)
    copy_s = _median_s(device, lambda: target.copy_(copied))
    return Device(2 * side**3 / product_s, 2 * copied.nbytes / copy_s, 0.0)
