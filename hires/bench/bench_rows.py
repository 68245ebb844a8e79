"""The rows of a benchmark: what is built, in which layout, and beside which other row.

The front end has composed their configs (``hires.cli.verbs.verb_bench``); here they get plans, and
the same on a small image, on which they are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hires.bench.race import Runner
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import INT8, PrecisionConfig
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import HiresError
from hires.core.registry import Registry
from hires.engine.device import RankDevice
from hires.engine.verify_bounds import in_float64
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

SMALL_SIDES = (64, 128, 256)
"""Pixels of the images on which rows are checked; below 64 the last maps of most networks are
single pixels."""
PLANNED = ("hires", "pipelining")


@dataclass(frozen=True)
class BenchRow:
    """One row of a table; ``config.batch`` images make one step."""

    name: str
    config: RunConfig
    plan: Plan | None = None  # of PLANNED peers: what is executed, and where it is cut
    peer: str = "hires"  # what builds it, see PEERS
    what: str = ""
    ranks: int = 1
    threads: int = 1  # of each rank
    baseline: str = ""  # row whose images per second count as 1
    beside: tuple[str, ...] = ()  # rows of others that do the same; the fastest is compared
    settings: Mapping[str, Any] = field(default_factory=dict)  # for the peer
    checked: bool = True  # whether its result must be that of one process; no bound's is
    small: BenchRow | None = None  # on a small image, in float64 unless it is quantised
    predicted_s: float | None = None  # of a step, by the model of this machine

    @property
    def training(self) -> bool:
        """Whether a step is one of training."""
        return self.config.task.name == "train"

    @property
    def lacks(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.config.device != "cpu" and self.threads > 1:
            return f"threads are those of the CPU, and this is device={self.config.device}"
        return PEERS[self.peer].lacks(self)

    @property
    def converted(self) -> bool:
        """Whether its library reads a file of the network, made for images of one size."""
        return PEERS[self.peer].converted


class PeerSteps(Runner):
    """A row on one rank, built in one way: hires, or a library beside it."""

    converted = False
    """Whether the library reads a file of the network: it is compared as it is timed."""
    values: Sequence[Tensor] = ()
    """Loss (1), or outputs (images, ...), of each microbatch of the step."""
    first = 0
    """Number of this rank's first microbatch among those of all replicas."""

    def __init__(self, row: BenchRow, rank: int, device: RankDevice) -> None:
        self.row, self.device, self.threads = row, device, row.threads

    @staticmethod
    def lacks(row: BenchRow) -> str:
        """Returns why it cannot run a row; empty: it can."""
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """Returns what this rank has of a step: ``loss/0`` or ``output/0``, ``gradients/NAME``."""
        kind = "loss" if self.row.training else "output"
        named = {f"{kind}/{number}": v for number, v in enumerate(self.values, self.first)}
        gradients = {f"gradients/{name}": p.grad for name, p in self.parameters.items()}
        return named | {name: grad for name, grad in gradients.items() if grad is not None}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns the part of a tensor of one process that this rank has."""
        return whole

    def after_step(self) -> None:
        """Frees values and gradients."""
        self.values = ()
        super().after_step()


PEERS: Registry[type[PeerSteps]] = Registry("peer", "hires.bench.peers")
"""``peer`` of a row -> what builds it."""


def row_of(values: Mapping[str, Any]) -> BenchRow:
    """Returns a row that the front end has composed, not planned yet.

    ``batch`` is that of a microbatch; the row's step has as many of them as its layout has.
    """
    config = from_dict(values["config"])
    config = replace(config, batch=config.batch * config.parallel.pieces)
    # A rate of 0 costs the same, and the weights stay where all rows can be compared.
    config = replace(config, optimizer=replace(config.optimizer, lr=0.0))
    if values.get("half_image"):
        config = replace(config, image=[(config.height + 1) // 2, config.width])
    names = {f.name for f in dataclasses.fields(BenchRow)} & values.keys()
    fields = {"ranks": config.parallel.num_ranks, **{name: values[name] for name in names}}
    return BenchRow(**{**fields, "config": config, "beside": (*fields.get("beside", ()),)})


def planned(row: BenchRow) -> BenchRow:
    """Returns a row with its plan, if its peer executes one; PlanError: it is impossible."""
    if row.peer not in PLANNED:
        return row
    plan = make_plan(row.config, graph_of(row.config))
    plan.require_ok()
    return replace(row, plan=plan, ranks=plan.world)


def with_small(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Returns rows with what they are checked by, on the smallest image that all can cut."""
    largest = max(row.config.image for row in rows)
    for side in SMALL_SIDES:
        with contextlib.suppress(HiresError):
            return [_with_small(row, [min(side, length) for length in largest]) for row in rows]
    return [_with_small(row, largest) for row in rows]


def _with_small(row: BenchRow, image: list[int]) -> BenchRow:
    if not row.checked or row.converted:
        return row
    config = replace(row.config, image=image)
    if config.precision.name != INT8:
        config = in_float64(config)
    return replace(row, small=planned(replace(row, config=config)))


def in_float32(config: RunConfig) -> RunConfig:
    """Returns the config of the plain network of a row."""
    return replace(config, precision=PrecisionConfig("fp32"))


def graph_of(config: RunConfig) -> Graph:
    """Returns the graph of a config's network and microbatch; equal ones are traced once."""
    batch = config.batch // config.parallel.pieces
    return _traced(json.dumps(to_dict(replace(config, batch=batch, parallel=ParallelConfig()))))


@functools.lru_cache(maxsize=64)
def _traced(config: str) -> Graph:
    return trace_config(from_dict(json.loads(config)))
