"""Makes the rows of ``hires bench layouts`` from ``layouts.yaml``.

Every row computes the same network on microbatches of the same size, so that its images per second
can be divided by those of its baseline. A row of hires stands beside rows of torch's own that do
the same work with the same weights, the same cut and the same loss.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import yaml

from hires.core.config.parallel_config import HaloConfig, ParallelConfig
from hires.core.config.run_config import (
    DataConfig,
    MeasureConfig,
    MemoryConfig,
    ModelConfig,
    RunConfig,
    TaskConfig,
)
from hires.core.errors import ConfigError
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan


def bench_data(name: str) -> Any:
    """Returns what a YAML file beside this module holds."""
    return yaml.safe_load((resources.files(__package__) / name).read_text(encoding="utf-8"))


CLASSES = 1000
LEARNING_RATE = 0.0
"""It costs the same as any other, and the weights stay where all rows can be compared."""
TASKS = ("train", "infer")
SINGLE = "single"
_ALWAYS = "one process"
_ROWS: dict[str, list[dict[str, Any]]] = bench_data("layouts.yaml")["groups"]
GROUPS = tuple(name for name in _ROWS if name != _ALWAYS)
"""Groups of rows to choose from; the rows of one process always run."""


@dataclass(frozen=True)
class LayoutsOptions:
    """The options of ``hires bench layouts``."""

    model: str = "resnet101"
    image: list[int] = field(default_factory=lambda: [512, 512])
    batch: int = 1
    """Images of one microbatch."""
    microbatches: int = 4
    """Of the pipelines."""
    rounds: int = 15
    warmup: int = 1
    tasks: tuple[str, ...] = TASKS
    only: tuple[str, ...] = GROUPS
    timeout_s: float = 3600.0


@dataclass(frozen=True)
class Contestant:
    """One row."""

    name: str
    what: str
    """In words, for the table."""
    kind: str
    """``hires``, ``module``, ``ddp`` or ``pipelining``: what builds it."""
    config: RunConfig
    """``config.batch`` images make one step."""
    plan: Plan | None = None
    """``hires`` and ``pipelining``: what is executed, and where it is cut."""
    num_ranks: int = 1
    threads: int = 1
    """Of each rank."""
    baseline: str = SINGLE
    """Row whose images per second count as 1."""
    peers: tuple[str, ...] = ()
    """Rows of torch's own that do the same; the fastest is compared."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of what builds it."""
    checked: bool = True
    """Whether its result must be that of one process; a bound computes something else."""


def line_up(options: LayoutsOptions, task: str) -> list[Contestant]:
    """Returns the rows of one task.

    Raises:
        ConfigError: the network is unknown.
        PlanError: a layout cannot cut this network and image.
    """
    base = RunConfig(
        image=list(options.image),
        batch=options.batch,
        steps=1,
        model=model_config(options.model),
        # Microbatches are made once and used again and again: no step waits for data.
        data=DataConfig(classes=CLASSES, prefetch=0),
        task=TaskConfig(name=task, lr=LEARNING_RATE),
        measure=MeasureConfig(warmup=0),
    )
    graph = trace_config(base)
    rows = [row for group in (_ALWAYS, *options.only) for row in _ROWS[group]]
    chosen = {row["name"]: row for row in rows if row.get("task", task) == task}
    return [_contestant(row, base, graph, options) for row in chosen.values()]


def model_config(name: str) -> ModelConfig:
    """Returns the network of a name as ``resnet101`` or ``preact_resnet110``.

    Raises:
        ConfigError: no network has this name.
    """
    cells = re.fullmatch(r"amoebanet-(\d+)-(\d+)", name)
    if cells:
        layers, filters = int(cells[1]), int(cells[2])
        return ModelConfig(name="amoebanet", layers=layers, filters=filters, classes=CLASSES)
    residual = re.fullmatch(r"(preact_)?resnet(\d+)", name)
    if residual is None:
        raise ConfigError(
            f"--model {name} is unknown; use resnet18, 34, 50, 101 or 152, preact_resnet110, or "
            f"amoebanet-LAYERS-FILTERS as amoebanet-18-208"
        )
    depth = int(residual[2])
    if residual[1]:
        return ModelConfig(name="preact_resnet", n=(depth - 2) // 9, classes=CLASSES)
    return ModelConfig(name="resnet", depth=depth, classes=CLASSES)


def _contestant(
    row: dict[str, Any], base: RunConfig, graph: Graph, options: LayoutsOptions
) -> Contestant:
    """Returns a row with its config, and with its plan if it has one."""
    counts = {"all": options.microbatches, "half": max(1, options.microbatches // 2)}
    layout = dict(row.get("parallel", {}))
    if "microbatches" in layout:
        layout["microbatches"] = counts[layout["microbatches"]]
    if "halo" in layout:
        layout["halo"] = HaloConfig(**layout["halo"])
    parallel = ParallelConfig(**layout)
    memory = MemoryConfig(checkpoint=row.get("checkpoint", "none"))
    batch = options.batch * parallel.pieces
    config = replace(base, batch=batch, parallel=parallel, memory=memory)
    if row.get("half_image"):
        height, width = base.image
        config = replace(config, image=[(height + 1) // 2, width])
    kind = row.get("kind", "hires")
    plan = None
    if kind in ("hires", "pipelining"):
        plan = make_plan(config, graph)
        plan.require_ok()
    return Contestant(
        name=row["name"],
        what=row["what"].format(**counts),
        kind=kind,
        config=config,
        plan=plan,
        num_ranks=plan.world if plan else row.get("ranks", parallel.replicas),
        threads=row.get("threads", 1),
        baseline=row.get("baseline", SINGLE),
        peers=tuple(row.get("peers", ())),
        settings=row.get("settings", {}),
        checked=row.get("checked", True),
    )
