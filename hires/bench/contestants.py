"""Makes the rows of ``hires bench layouts`` from ``layouts.yaml``.

Every row computes the same network on microbatches of the same size. A row of hires stands beside
rows of torch's own that do the same work with the same weights, the same cut and the same loss.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from typing import Any

import yaml

from hires.bench.bench_output import names_of, option
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError
from hires.engine.device import DEVICES
from hires.engine.verify_bounds import in_float64
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.hardware import CPU, CUDA, NCCL, require_gpus
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.route_choice import resolve


def bench_data(name: str) -> Any:
    """Returns what a YAML file beside this module holds."""
    return yaml.safe_load((resources.files(__package__) / name).read_text(encoding="utf-8"))


CLASSES = 1000
LEARNING_RATE = 0.0
"""It costs the same as any other, and the weights stay where all rows can be compared."""
TASKS = ("train", "infer")
SMALL_SIDES = (64, 128, 256)
"""Pixels of the images of twins; below 64 the last maps of most networks are single pixels."""
AUTO = "auto"
SINGLE = "single"
_ALWAYS = "one process"
_ROWS: dict[str, list[dict[str, Any]]] = bench_data("layouts.yaml")["groups"]
GROUPS = tuple(name for name in _ROWS if name != _ALWAYS)
"""Groups of rows to choose from; the rows of one process always run."""


def image_size(flag: str, text: str) -> tuple[int, int]:
    """Returns (height, width) of ``512`` or ``480x640``."""
    sides = text.split("x")
    if not all(side.isdecimal() and int(side) for side in sides) or len(sides) > 2:
        raise ConfigError(f"{flag} {text} must be n or HxW, as 512 or 480x640")
    return int(sides[0]), int(sides[-1])


@dataclass(frozen=True)
class LayoutsOptions:
    """The options of ``hires bench layouts``."""

    model: str = option("resnet101", "resnet18 to 152, preact_resnet110, amoebanet-LAYERS-FILTERS")
    image: Sequence[int] = option("512", "n or HxW in pixels", parse=image_size)
    batch: int = option(1, "images of one microbatch")
    microbatches: int = option(4, "of the pipelines")
    rounds: int = option(15, "samples of every row")
    warmup: int = option(1, "rounds before them", low=0)
    device: str = option(AUTO, "auto, cpu or cuda; simulated rehearses without times")
    task: tuple[str, ...] = option(",".join(TASKS), "tasks", parse=names_of(TASKS))
    only: tuple[str, ...] = option(",".join(GROUPS), "layouts to measure", parse=names_of(GROUPS))
    memory: bool = option(True, "measure no peaks of memory")
    timeout: float = option(3600.0, "seconds for everything")

    def __post_init__(self) -> None:
        if self.device not in (AUTO, *DEVICES):
            names = ", ".join((AUTO, *sorted(DEVICES)))
            raise ConfigError(f"--device {self.device} is unknown; use {names}")


@dataclass(frozen=True)
class Contestant:
    """One row, and ``what`` it is in words."""

    name: str
    what: str
    config: RunConfig
    """``config.batch`` images make one step."""
    plan: Plan | None
    """``hires`` and ``pipelining``: what is executed, and where it is cut."""
    num_ranks: int
    kind: str = "hires"
    """``hires``, ``shard``, ``module``, ``ddp`` or ``pipelining``: what builds it."""
    threads: int = 1
    """Of each rank."""
    baseline: str = SINGLE
    """Row whose images per second count as 1."""
    peers: Sequence[str] = ()
    """Rows of torch's own that do the same; the fastest is compared."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of what builds it."""
    checked: bool = True
    """Whether its result must be that of one process; a bound computes something else."""
    twin: Contestant | None = None
    """Of one that is checked: the same on a small image in float64."""

    @property
    def not_run(self) -> str:
        """Why it cannot run on its device; empty if it can."""
        device, backend = self.config.device, self.config.comm.backend
        if device == CPU:
            return ""
        if self.kind == "shard":
            return f"hires.shard has been tried on the CPU alone, and this is device={device}"
        if self.threads > 1 or not self.settings.get("trick", True):
            return f"only the CPU has threads and the 1x1 trick, and this is device={device}"
        if device != CUDA and self.kind in ("ddp", "pipelining"):
            return f"torch has no backend for messages of device={device}"
        if self.kind == "pipelining" and backend != NCCL:
            return "ranks share a GPU, and torch sends maps between GPUs through NCCL only"
        return ""


def line_up(options: LayoutsOptions, task: str) -> list[Contestant]:
    """Returns the rows of one task, on the device and with the backend that runs would have.

    PlanError: a layout cannot cut the network. RunError: this machine lacks the device.
    """
    base = {
        "device": options.device,
        "image": list(options.image),
        "batch": options.batch,
        "steps": 1,
        "model": asdict(model_config(options.model)),
        # Microbatches are made once and used again and again: no step waits for data.
        "data": {"classes": CLASSES, "prefetch": 0},
        "task": {"name": task},
        "optimizer": {"lr": LEARNING_RATE},
        "measure": {"warmup": 0},
    }
    first = resolve(from_dict(base))
    require_gpus(first)
    graph = trace_config(first)
    rows = [row for group in (_ALWAYS, *options.only) for row in _ROWS[group]]
    chosen = {row["name"]: row for row in rows if row.get("task", task) == task}
    return with_twins([_contestant(row, base, graph, options) for row in chosen.values()])


def with_twins(rows: list[Contestant]) -> list[Contestant]:
    """Returns rows with their twins, all on the smallest image that every layout can cut.

    The first row is of one process and one microbatch.
    """
    height, width = rows[0].config.image
    for side in SMALL_SIDES:
        image = [min(height, side), min(width, side)]
        with contextlib.suppress(HiresError):
            return _twinned(rows, image)
    return _twinned(rows, [height, width])


def _twinned(rows: list[Contestant], image: list[int]) -> list[Contestant]:
    graph = trace_config(in_float64(replace(rows[0].config, image=image)))
    made = []
    for row in rows:
        config, plan = in_float64(replace(row.config, image=image)), None
        if row.plan is not None:
            plan = make_plan(config, graph)
            plan.require_ok()
        twin = replace(row, config=config, plan=plan) if row.checked else None
        made.append(replace(row, twin=twin))
    return made


def model_config(name: str, flag: str = "--model") -> ModelConfig:
    """Returns the network of a name as ``resnet101``; ConfigError, which names ``flag``: none."""
    if cells := re.fullmatch(r"amoebanet-(\d+)-(\d+)", name):
        layers, filters = map(int, cells.groups())
        return ModelConfig(name="amoebanet", layers=layers, filters=filters, classes=CLASSES)
    residual = re.fullmatch(r"(preact_)?resnet(\d+)", name)
    if residual is None:
        raise ConfigError(
            f"{flag} {name} is unknown; use resnet18, 34, 50, 101 or 152, preact_resnet110, or "
            f"amoebanet-LAYERS-FILTERS as amoebanet-18-208"
        )
    depth = int(residual[2])
    if residual[1]:
        return ModelConfig(name="preact_resnet", n=(depth - 2) // 9, classes=CLASSES)
    return ModelConfig(name="resnet", depth=depth, classes=CLASSES)


def _contestant(
    row: dict[str, Any], base: dict[str, Any], graph: Graph, options: LayoutsOptions
) -> Contestant:
    """Returns a row with its config, and with its plan if it has one."""
    counts = {"all": options.microbatches, "half": max(1, options.microbatches // 2)}
    layout = row.get("parallel", {})
    if "microbatches" in layout:
        layout = {**layout, "microbatches": counts[layout["microbatches"]]}
    memory = {"checkpoint": row.get("checkpoint", "none")}
    config = resolve(from_dict({**base, "parallel": layout, "memory": memory}))
    config = replace(config, batch=options.batch * config.parallel.pieces)
    if row.get("half_image"):
        config = replace(config, image=[(config.height + 1) // 2, config.width])
    plan = None
    if row.get("kind", "hires") in ("hires", "pipelining"):
        plan = make_plan(config, graph)
        plan.require_ok()
    own = {field.name for field in fields(Contestant)} - {"name", "what"}
    return Contestant(
        name=row["name"],
        what=row["what"].format(**counts),
        config=config,
        plan=plan,
        num_ranks=plan.world if plan else row.get("ranks", config.parallel.replicas),
        **{key: value for key, value in row.items() if key in own},
    )
