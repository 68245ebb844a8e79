"""Checks all that needs a GPU in one command: ``hires bench gpu``, or ``scripts/gpu_check.py``.

It needs torch, numpy and safetensors, one GPU, no network and eight minutes. With ``--device cpu``
or ``simulated`` the script itself is rehearsed; what needs CUDA is then listed as not run.

    parity     every family of layouts in float64 against one process on the CPU
    resume     a run that begins on the CPU and ends on the device, and the other way round
    precision  every precision against float64, within its bound
    streams    NCCL's communicators and posts in one process; a run with and without images read
               ahead; the time line of events
    memory     predicted and measured, of every layout
    speed      three networks, 256 to 2048 pixels, beside plain torch

Exit codes: 0 all passed, 1 a check failed, 2 bad options.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hires.bench.bench_output import Benchmark, BenchTable, Result, Results, names_of, option
from hires.bench.gpu_runs import FAMILIES, Runs, losses, memory_ratio, timed_share
from hires.bench.gpu_speed import Speed, speed_table, speeds
from hires.bench.nccl_posts import nccl_posts
from hires.core.errors import ConfigError, HiresError

DEVICES = ("cuda", "cpu", "simulated")
PARTS = ("parity", "resume", "precision", "streams", "memory", "speed")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
RESUMED = 1e-9
"""Largest relative difference of losses in float64 between devices."""
LEAST_TIMED = 0.5
"""Least share of a step's time that its time line shows."""
MEMORY = 1.1
"""Largest factor between predicted and measured memory."""

SHOWN = ("output", "gradients")
"""Kinds of tensors whose largest difference from float64 is shown beside what is allowed."""

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"
Row = dict[str, str]

log = logging.getLogger(__name__)


class NotRunError(Exception):
    """Why a check was left out."""


def image_sizes(flag: str, text: str) -> tuple[int, ...]:
    """Returns the sizes of ``256,512``."""
    if not all(size.isdecimal() and int(size) >= 32 for size in text.split(",")):
        raise ConfigError(f"{flag} {text} must be sizes of 32 pixels or more, as 256,512")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class GpuOptions:
    """The options of ``hires bench gpu``."""

    device: str = option("cuda", "cuda, or cpu or simulated for a rehearsal")
    only: tuple[str, ...] = option(
        ",".join(PARTS),
        "sections",
        parse=names_of(PARTS),
    )
    layouts: tuple[str, ...] = option(
        ",".join(FAMILIES), "of parity and memory", parse=names_of(tuple(FAMILIES))
    )
    images: Sequence[int] = option("256,512,1024,2048", "of speed, in pixels", parse=image_sizes)
    seconds: float = option(480.0, "after which nothing more begins")
    timeout: float = option(300.0, "seconds for each run")

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"--device {self.device} is unknown; use {', '.join(DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            why = "this torch is built for CPUs" if torch.version.cuda is None else "no GPU is seen"
            raise ConfigError(f"--device cuda: {why}; --device cpu or simulated is a rehearsal")


@dataclass
class GpuCheck:
    """What all sections share: where they run, and until when."""

    options: GpuOptions
    runs: Runs
    deadline_s: float

    @property
    def device(self) -> str:
        """Kind of the device."""
        return self.options.device

    def row(self, section: str, name: str, check: Callable[[], tuple[bool, str]]) -> Row:
        """Returns the line of a check, which returns whether it passed and what it found."""
        began_s = time.monotonic()
        try:
            if began_s > self.deadline_s:
                raise NotRunError(f"{self.options.seconds:g} s are over")
            passed, found = check()
            state = OK if passed else FAILED
        except NotRunError as why:
            state, found = NOT_RUN, str(why)
        except HiresError as error:
            state, found = FAILED, " ".join(str(error).split())
        took_s = time.monotonic() - began_s
        log.info("%s, %s: %s, %s", section, name, state, found)
        return {
            "section": section,
            "check": name,
            "state": state,
            "found": found,
            "seconds": f"{took_s:.1f}",
        }


def measure(options: GpuOptions) -> Results:
    """Yields all rows so far, after every check."""
    result: Result = {"device": _device(options.device), "checks": [], "speed": [], "ok": True}
    with tempfile.TemporaryDirectory(prefix="hires-gpu-") as folder:
        deadline_s = time.monotonic() + options.seconds
        check = GpuCheck(options, Runs(Path(folder), options.device, options.timeout), deadline_s)
        for section in options.only:
            for row in SECTIONS[section](check):
                kept = "speed" if "network" in row else "checks"
                result[kept].append(row)
                result["ok"] = result["ok"] and row.get("state") != FAILED
                yield result


def parity(check: GpuCheck) -> Iterator[Row]:
    """Compares every family of layouts with one process.

    All ranks of a layout share the one GPU, so their messages go through gloo.
    """
    for name in check.options.layouts:
        yield check.row("parity", name, lambda name=name: _verified(check, FAMILIES[name]))  # type: ignore[misc]


def _verified(check: GpuCheck, *changes: dict[str, Any]) -> tuple[bool, str]:
    answer = check.runs.verify(check.runs.config("verify", *changes))
    worst = {kind: one for kind, one in answer["worst"].items() if one is not None}
    found = (f"{kind} {worst[kind]['error']:.1e} of {worst[kind]['bound']:.0e}" for kind in SHOWN)
    noise = f"; {len(answer['by_noise'])} tensors by their noise" if answer["by_noise"] else ""
    return answer["ok"], f"{', '.join(found)}{noise}"


def resume(check: GpuCheck) -> Iterator[Row]:
    """Resumes a run on another kind of device than it began on."""
    for begins, ends in (("cpu", check.device), (check.device, "cpu")):
        name = f"{begins} to {ends}"
        yield check.row("resume", name, lambda a=begins, b=ends: _resumed(check, a, b))  # type: ignore[misc]


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


def precision(check: GpuCheck) -> Iterator[Row]:
    """Compares every precision with float64, in two tiles."""
    for name in PRECISIONS:

        def compared(name: str = name) -> tuple[bool, str]:
            if name == "tf32" and check.device != "cuda":
                raise NotRunError("no CUDA")
            tiles = {"parallel": {"tiles": [1, 2]}, "precision": {"name": name}}
            return _verified(check, tiles)

        yield check.row("precision", name, compared)


def streams(check: GpuCheck) -> Iterator[Row]:
    """Runs NCCL in one process, and the same run with and without overlap."""

    def posts() -> tuple[bool, str]:
        if check.device != "cuda":
            raise NotRunError("no CUDA")
        return nccl_posts()

    def overlap() -> tuple[bool, str]:
        found = []
        for ahead in (0, 2):
            config = check.runs.config(
                f"prefetch-{ahead}",
                {"parallel": {"tiles": [1, 2]}, "precision": {"name": "fp32"}, "steps": 6},
                {"data": {"prefetch": ahead}},
            )
            found.append(losses(check.runs.run(config)))
        same = found[0] == found[1]
        return same, f"losses of 6 steps are {'' if same else 'not '}bitwise equal"

    yield check.row("streams", "NCCL, one rank: communicators and posts", posts)

    def timed() -> tuple[bool, str]:
        tiles = {"parallel": {"tiles": [1, 2]}, "precision": {"name": "fp32"}, "steps": 6}
        share = timed_share(check.runs.run(check.runs.config("timeline", tiles)))
        return LEAST_TIMED <= share <= 1.05, f"its spans are {share:.0%} of the steps on the clock"

    yield check.row("streams", "images read ahead or not", overlap)
    yield check.row("streams", "time line of events", timed)


def memory(check: GpuCheck) -> Iterator[Row]:
    """Compares the predicted memory of every layout with what it needed."""
    size = {"image": 256, "batch": 8, "precision": {"name": "fp32"}}
    for name in check.options.layouts:

        def compared(name: str = name) -> tuple[bool, str]:
            config = check.runs.config("memory", FAMILIES[name], size)
            ratio = memory_ratio(check.runs.run(config, memory=True))
            found = f"predicted {ratio - 1:+.1%} of the measured peak"
            if check.device != "cuda":  # the whole process counts, most of it libraries
                raise NotRunError(f"no CUDA; on this device {found}")
            return 1 / MEMORY <= ratio <= MEMORY, found

        yield check.row("memory", name, compared)


def speed(check: GpuCheck) -> Iterator[Row]:
    """Times three networks at several sizes, in every precision, beside plain torch."""
    try:
        yield from speeds(Speed(check.device, tuple(check.options.images), check.deadline_s))
    except HiresError as error:
        message = str(error)
        yield check.row("speed", "all rows", lambda: (False, message))


SECTIONS: dict[str, Callable[[GpuCheck], Iterator[Row]]] = {
    "parity": parity,
    "resume": resume,
    "precision": precision,
    "streams": streams,
    "memory": memory,
    "speed": speed,
}


def _tables(result: Result) -> list[BenchTable]:
    fact = f"Device: {result['device']}."
    tables = [BenchTable("Checks on this device", result["checks"], fact=fact)]
    if result["speed"]:
        tables.append(speed_table(result["speed"]))
    return [table for table in tables if table.rows]


def _device(kind: str) -> str:
    if kind != "cuda":
        return f"{kind} (a rehearsal: nothing of it ran on a GPU)"
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


BENCHMARK = Benchmark("gpu", __doc__, GpuOptions, measure, _tables)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
