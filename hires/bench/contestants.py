"""Which layouts are measured against each other, and which row is compared with which?

Every row computes the same network on microbatches of the same size, so that its images per second
can be divided by those of its baseline. A row of hires stands beside rows of torch's own that do
the same work with the same weights, the same cut and the same loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hires.bench import more_rows
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

CLASSES = 1000
LEARNING_RATE = 0.0
"""It costs the same as any other, and the weights stay where all rows can be compared."""
TASKS = ("train", "infer")
GROUPS = ("sp", "pp", "dp", "gems", "halo", "memory", "sp+gems")
"""What can be chosen; the rows of one process always run."""
SINGLE = "single"
PIECES = "single, microbatches"


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

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
    """``hires``, ``module``, ``ddp`` or ``pipelining``: who builds it."""
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
    """Keyword arguments of whoever builds it."""
    training_only: bool = False
    """Whether it says something about training only."""
    checked: bool = True
    """Whether its answer must be that of one process; a bound computes something else."""


def line_up(options: Options, task: str) -> list[Contestant]:
    """Returns the rows of one task.

    Raises:
        ConfigError: the network is unknown.
        PlanError: a layout cannot cut this network and image.
    """
    lines = Lines(options, task)
    rows = _one_process(lines)
    groups: dict[str, Callable[[Lines], list[Contestant]]] = {
        "sp": _tiles,
        "pp": _pipelines if task == "train" else _forward_pipelines,
        "dp": _replicas if task == "train" else _forward_replicas,
        "gems": more_rows.mirrored,
        "halo": more_rows.halos,
        "memory": more_rows.recomputed,
        "sp+gems": more_rows.tiled_and_mirrored,
    }
    if "sp" not in options.only and {"halo", "memory"} & set(options.only):
        rows.append(_plain_tiles(lines))  # they are measured by it
    for name in options.only:
        rows += groups[name](lines)
    return [row for row in rows if task == "train" or not row.training_only]


def model_config(name: str) -> ModelConfig:
    """Returns the network of a name as ``resnet101`` or ``preact_resnet110``.

    Raises:
        ConfigError: no network has this name.
    """
    cells = re.fullmatch(r"amoebanet-(\d+)-(\d+)", name)
    if cells:
        layers, filters = int(cells[1]), int(cells[2])
        return ModelConfig(name="amoebanet", layers=layers, filters=filters, classes=CLASSES)
    found = re.fullmatch(r"(preact_)?resnet(\d+)", name)
    if found is None:
        raise ConfigError(
            f"--model {name} is unknown; use resnet18, 34, 50, 101 or 152, preact_resnet110, or "
            f"amoebanet-LAYERS-FILTERS as amoebanet-18-208"
        )
    depth = int(found[2])
    if found[1]:
        return ModelConfig(name="preact_resnet", n=(depth - 2) // 9, classes=CLASSES)
    return ModelConfig(name="resnet", depth=depth, classes=CLASSES)


class Lines:
    """Makes rows of one task; the network is traced once."""

    def __init__(self, options: Options, task: str) -> None:
        self.options = options
        self.microbatches = options.microbatches
        self.base = RunConfig(
            image=list(options.image),
            batch=options.batch,
            steps=1,
            model=model_config(options.model),
            # Microbatches are made once and used again and again: nobody waits for data.
            data=DataConfig(classes=CLASSES, prefetch=0),
            task=TaskConfig(name=task, lr=LEARNING_RATE),
            measure=MeasureConfig(warmup=0),
        )
        self.graph: Graph = trace_config(self.base)

    def config(self, layout: dict[str, Any], checkpoint: str = "none") -> RunConfig:
        """Returns the config of a layout; every microbatch has ``options.batch`` images."""
        parallel = ParallelConfig(**layout)
        batch = self.options.batch * parallel.pieces
        memory = MemoryConfig(checkpoint=checkpoint)
        return replace(self.base, batch=batch, parallel=parallel, memory=memory)

    def ours(
        self, name: str, what: str, layout: dict[str, Any], checkpoint: str = "none", **more: Any
    ) -> Contestant:
        """Returns a row that runs a plan: one of hires, or with another ``kind``."""
        config = self.config(layout, checkpoint)
        plan = make_plan(config, self.graph)
        plan.require_ok()
        more = {"kind": "hires", "num_ranks": plan.world, **more}
        return Contestant(name, what, config=config, plan=plan, **more)

    @staticmethod
    def halo(**keys: Any) -> HaloConfig:
        """Returns how tiles borrow their halos."""
        return HaloConfig(**keys)

    def torchs(self, name: str, what: str, kind: str, config: RunConfig, **more: Any) -> Contestant:
        """Returns a row of torch's own."""
        return Contestant(name, what, kind, config, **more)


def _one_process(lines: Lines) -> list[Contestant]:
    """Returns the honest baseline, what it is measured by itself, and two threads."""
    config = lines.config({})
    return [
        lines.ours(SINGLE, "hires, one process, one thread", {}, peers=("module",)),
        lines.torchs("module", "plain nn.Module with the 1x1 trick", "module", config),
        lines.torchs(
            "module, no trick",
            "plain nn.Module as it is",
            "module",
            config,
            settings={"trick": False},
        ),
        lines.ours("two threads", "hires, one process, two threads", {}, threads=2),
    ]


def _tiles(lines: Lines) -> list[Contestant]:
    """Returns two tiles both ways, and their bound: half images that do not talk."""
    height, width = lines.base.image
    half = replace(lines.base, image=[(height + 1) // 2, width])
    return [
        _plain_tiles(lines),
        lines.ours("tiles 1x2", "hires, a left and a right tile", {"tiles": [1, 2]}),
        lines.torchs(
            "half images",
            "bound of two tiles: nn.Module on half an image each, no message",
            "module",
            half,
            num_ranks=2,
            checked=False,
        ),
    ]


def _plain_tiles(lines: Lines) -> Contestant:
    """Returns two tiles as they are by default."""
    return lines.ours("tiles 2x1", "hires, an upper and a lower tile", {"tiles": [2, 1]})


def _pieces(lines: Lines) -> Contestant:
    """Returns the baseline of the pipelines, which adds up as many gradients."""
    count = lines.microbatches
    # All forward passes first, as in GPipe, would hold all activations: one process has no need to.
    layout = {"microbatches": count, "schedule": "1f1b"}
    return lines.ours(PIECES, f"hires, one process, {count} microbatches in turn", layout)


def _pipelines(lines: Lines) -> list[Contestant]:
    """Returns two stages under both schedules, beside torch.distributed.pipelining."""
    count = lines.microbatches
    rows = [_pieces(lines)]
    for schedule, torchs in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        layout = {"stages": 2, "microbatches": count, "schedule": schedule}
        peer = f"torch {schedule}"
        ours = f"hires, two stages, {count} microbatches"
        rows.append(lines.ours(f"pp {schedule}", ours, layout, baseline=PIECES, peers=(peer,)))
        what = f"torch.distributed.pipelining {torchs}, the same cut"
        rows.append(lines.ours(peer, what, layout, kind="pipelining", baseline=PIECES))
    return rows


def _forward_pipelines(lines: Lines) -> list[Contestant]:
    """Returns two stages in inference, where all schedules are one."""
    count = lines.microbatches
    layout = {"stages": 2, "microbatches": count}
    what = "torch.distributed.pipelining ScheduleGPipe.eval, the same cut"
    return [
        _pieces(lines),
        lines.ours("pp", "hires, two stages", layout, baseline=PIECES, peers=("torch pipelining",)),
        lines.ours("torch pipelining", what, layout, kind="pipelining", baseline=PIECES),
    ]


def _replicas(lines: Lines) -> list[Contestant]:
    """Returns two replicas beside DistributedDataParallel."""
    layout = {"replicas": 2}
    config = lines.config(layout)
    what = "DistributedDataParallel, default buckets"
    views = {"views": True}
    return [
        lines.ours("dp", "hires, two replicas", layout, peers=("ddp", "ddp views")),
        lines.torchs("ddp", what, "ddp", config, num_ranks=2),
        lines.torchs(
            "ddp views",
            "DistributedDataParallel, gradient_as_bucket_view",
            "ddp",
            config,
            num_ranks=2,
            settings=views,
        ),
    ]


def _forward_replicas(lines: Lines) -> list[Contestant]:
    """Returns two replicas in inference, where they say nothing to each other."""
    layout = {"replicas": 2}
    what = "plain nn.Module with the 1x1 trick on both ranks"
    config = lines.config(layout)
    return [
        lines.ours("dp", "hires, two replicas", layout, peers=("two modules",)),
        lines.torchs("two modules", what, "module", config, num_ranks=2),
    ]
