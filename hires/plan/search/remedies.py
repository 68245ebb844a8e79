"""Which single change of a plan that does not fit its memory would fit?

Each kind of change is a ladder whose rungs lead away from the plan: one stage more, twice as many,
four times as many. All ladders are climbed together, rung by rung, until something fits or the time
is used. Nothing is guessed: every rung that is named was planned and predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import HiresError
from hires.core.units import size
from hires.plan.memory import LIBRARIES_BYTES, Room
from hires.plan.plan import Plan

BUDGET_S = 20.0
"""Seconds after which no further change is predicted; most users would rather try for themselves
than wait longer. A prediction that has begun is awaited."""
FACTORS = (2, 4)
"""By how much microbatches and tiles are multiplied."""

Predict = Callable[[RunConfig], Plan | None]
"""Returns the plan of a config with its memory, or None if it cannot be planned or predicted."""


@dataclass(frozen=True)
class Change:
    """A change of one key of a config."""

    text: str
    """The overrides, as a user would type them."""
    keys: dict[str, dict[str, Any]]
    """The keys of ``parallel``, ``memory`` or ``launcher`` that it sets."""
    stages: int = 0
    """Stages that it asks for, if that is what it changes."""


@dataclass(frozen=True)
class Trial:
    """A change whose memory was predicted."""

    change: Change
    words: str
    """The change, and what it needs."""
    ranks: int
    """Ranks of its world."""
    fits: bool


class Search:
    """Predicts changes of one config until its time is used."""

    def __init__(self, config: RunConfig, room: Room, predict: Predict) -> None:
        self.trials: list[Trial] = []
        """All changes that were predicted, in order."""
        self._config = config
        self._room = room
        self._predict = predict
        self._end_s = time.monotonic() + BUDGET_S
        self._cut_short = False

    def summary(self) -> str:
        """Returns in words what was predicted, with what it needs, and whether time ran out."""
        known = ", ".join(trial.words for trial in self.trials) or "nothing that makes a plan"
        return f"tried{f' in {BUDGET_S:.0f} s' if self._cut_short else ''}: {known}"

    def remedies(self, num_layers: int) -> list[str]:
        """Returns the changes that would fit, with what they need, the nearest first.

        Near is what needs few ranks more or fewer, and of those what comes on an earlier rung.

        Args:
            num_layers: the most stages that the network can be cut into.
        """
        found: list[Trial] = []
        for rung in itertools.zip_longest(*ladders(self._config, num_layers, self._room)):
            tried = [self._trial(change) for change in rung if change is not None]
            found = [trial for trial in tried if trial is not None and trial.fits]
            if found:
                break
        found = [self._nearest(trial) if trial.change.stages else trial for trial in found]
        ranks = self._config.parallel.num_ranks
        return [trial.words for trial in sorted(found, key=lambda t: abs(t.ranks - ranks))]

    def _trial(self, change: Change) -> Trial | None:
        """Predicts a change; None if there is no time, or it makes no plan that could be run."""
        if time.monotonic() >= self._end_s:
            self._cut_short = True
            return None
        try:
            config = _changed(self._config, change)
        except HiresError:  # the keys do not go together
            return None
        if not self._possible(config) or (plan := self._predict(config)) is None:
            return None
        room = dataclasses.replace(self._room, nodes=config.launcher.num_nodes)
        fits = room.shortage(config, plan) is None
        words = f"{change.text} ({_needs(room, plan)})"
        self.trials.append(Trial(change, words, plan.world, fits))
        return self.trials[-1]

    def _possible(self, config: RunConfig) -> bool:
        """Whether the ranks are offered and their libraries alone fit, which costs no time."""
        ranks, nodes = config.parallel.num_ranks, config.launcher.num_nodes
        most = self._room.machine_bytes
        if most is not None and math.ceil(ranks / nodes) * LIBRARIES_BYTES > most:
            return False
        return ranks <= config.launcher.offered_ranks

    def _nearest(self, trial: Trial) -> Trial:
        """Returns the number of stages nearest to the config's that fits, while there is time.

        Bisects between a number that fits and the last one before it that did not.
        """
        own = self._config.parallel.stages
        far = trial.change.stages
        missed = [t.change.stages for t in self.trials if t.change.stages and not t.fits]
        near = min([own, *missed], key=lambda stages: abs(far - stages))
        while abs(far - near) > 1 and not self._cut_short:
            middle = (near + far) // 2
            found = self._trial(_stages(self._config, middle))
            if found is not None and found.fits:
                trial, far = found, middle
            else:
                near = middle
        return trial


def _needs(room: Room, plan: Plan) -> str:
    """Returns what a plan needs of what there is too little of, in words."""
    where = " on a node" if room.source else " in all"
    return f"{size(room.needed(plan))}{where if room.shared else ''}"


def ladders(config: RunConfig, num_layers: int, room: Room) -> list[list[Change]]:
    """Returns single changes that lower the memory, each ladder from near to far.

    First what leaves the ranks as they are, by how little it slows them down. Where a rank needs
    too much, more ranks follow. Where all of them together do, fewer ranks go before all but
    recomputation: each needs its libraries, whatever it holds; more nodes, where a job may have
    them, go first.
    """
    microbatches, checkpoints = _microbatches(config), [[kind] for kind in _checkpoints(config)]
    if not room.shared:
        return [microbatches, *checkpoints, _more_stages(config, num_layers), _more_tiles(config)]
    fewer = [_fewer_replicas(config), _fewer_tiles(config), _fewer_stages(config)]
    nodes = [more] if (more := _more_nodes(config)) else []
    return [*nodes, *checkpoints[:1], *fewer, microbatches, *checkpoints[1:]]


def _more_nodes(config: RunConfig) -> list[Change]:
    """Returns twice as many nodes each time, up to one for each rank."""
    launcher, ranks = config.launcher, config.parallel.num_ranks
    if launcher.name != "slurm":
        return []
    many = itertools.takewhile(lambda n: n < 2 * ranks, _doubled(launcher.nodes))
    counts = sorted({min(count, ranks) for count in many} - {launcher.nodes})
    return [Change(f"launcher.nodes={n}", {"launcher": {"nodes": n}}) for n in counts]


def _microbatches(config: RunConfig) -> list[Change]:
    """Returns more microbatches, where the batch divides into them."""
    parallel = config.parallel
    many = [f * parallel.microbatches for f in FACTORS if config.batch % (parallel.pieces * f) == 0]
    return [Change(f"parallel.microbatches={n}", {"parallel": {"microbatches": n}}) for n in many]


def _checkpoints(config: RunConfig) -> list[Change]:
    """Returns the other ways to compute again instead of keeping; none in inference."""
    if config.task.name != "train":
        return []
    kinds = [kind for kind in ("block", "stage") if kind != config.memory.checkpoint]
    return [Change(f"memory.checkpoint={kind}", {"memory": {"checkpoint": kind}}) for kind in kinds]


def _stages(config: RunConfig, stages: int) -> Change:
    """Returns another number of stages; layers per stage that were given fit no other number."""
    freed = " parallel.balance=null" if config.parallel.balance is not None else ""
    keys = {"stages": stages, "balance": None}
    return Change(f"parallel.stages={stages}{freed}", {"parallel": keys}, stages)


def _more_stages(config: RunConfig, num_layers: int) -> list[Change]:
    """Returns one stage more, then twice as many each time, up to what layers and ranks allow."""
    parallel = config.parallel
    replicas = parallel.replicas
    spare = config.launcher.offered_ranks // replicas - parallel.num_ranks // replicas
    most = min(num_layers, parallel.stages + spare // parallel.local_dp)
    counts = {parallel.stages + 1, most}
    counts.update(itertools.takewhile(lambda n: n < most, _doubled(parallel.stages)))
    return [_stages(config, n) for n in sorted(counts) if parallel.stages < n <= most]


def _doubled(count: int) -> Iterator[int]:
    """Yields twice a count, four times, and so on without end."""
    while True:
        count *= 2
        yield count


def _fewer_stages(config: RunConfig) -> list[Change]:
    """Returns half as many stages each time, down to one."""
    return [_stages(config, count) for count in _halves(config.parallel.stages)]


def _fewer_replicas(config: RunConfig) -> list[Change]:
    """Returns half as many replicas each time, down to one."""
    counts = _halves(config.parallel.replicas)
    return [Change(f"parallel.replicas={n}", {"parallel": {"replicas": n}}) for n in counts]


def _halves(count: int) -> list[int]:
    """Returns half of a count, half of that, and so on down to 1."""
    return [count >> shift for shift in range(1, count.bit_length())]


def _more_tiles(config: RunConfig) -> list[Change]:
    """Returns grids of twice and four times as many tiles."""
    found, grids = [], _grids(config)
    for _ in FACTORS:
        grids = [_twice(grid) for grid in grids]
        found.append(_tiles(config, grids))
    return found


def _fewer_tiles(config: RunConfig) -> list[Change]:
    """Returns grids of half as many tiles each time, down to one."""
    found, grids = [], _grids(config)
    while any(grid != [1, 1] for grid in grids):
        grids = [_half(grid) for grid in grids]
        found.append(_tiles(config, grids))
    return found


def _grids(config: RunConfig) -> list[list[int]]:
    """Returns the grids in ``parallel.tiles``, one of them if all spatial stages share it."""
    tiles: list[Any] = config.parallel.tiles
    return tiles if isinstance(tiles[0], list) else [tiles]


def _tiles(config: RunConfig, grids: list[list[int]]) -> Change:
    """Returns other grids, written as the config writes its own."""
    tiles = grids if isinstance(config.parallel.tiles[0], list) else grids[0]
    keys = {"tiles": tiles, "spatial_stages": config.parallel.spatial_stages or 1}
    return Change(f"parallel.tiles={tiles}".replace(" ", ""), {"parallel": keys})


def _twice(grid: list[int]) -> list[int]:
    """Returns a grid of twice as many tiles, as square as may be."""
    rows, cols = grid
    return [rows, 2 * cols] if cols < rows else [2 * rows, cols]


def _half(grid: list[int]) -> list[int]:
    """Returns a grid of half as many tiles, as square as may be."""
    rows, cols = grid
    return [rows, max(1, cols // 2)] if cols >= rows else [max(1, rows // 2), cols]


def _changed(config: RunConfig, change: Change) -> RunConfig:
    """Returns a config with a change made.

    Raises:
        ConfigError: the keys do not go together.
    """
    values = to_dict(config)
    for group, inner in change.keys.items():
        values[group].update(inner)
    return from_dict(values)
