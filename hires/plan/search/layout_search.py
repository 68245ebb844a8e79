"""Searches for the layouts nearest to one that was asked for, within a budget.

    candidates, near to far            ->  sensible      numbers only: keys, batch, ranks offered
    (ladders, climbed rung by rung)    ->  least bytes   numbers only: a bound from below
                                       ->  trial         planned and predicted: seconds each
                                       ->  best N, or why the others were out

A kind of change is a ladder: one stage more, twice as many, four times as many. Ladders are lazy,
so a search that ends at the first rung never sees the others. Too many ranks need no trials; too
little memory does. Only what was really planned and predicted is called a fit.

This looks around one layout, whose ranks it may change, for what fits at all. Which layout of a
number of ranks is the fastest is another question: :mod:`hires.plan.search.choose` lists them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.plan.checks import check_numbers
from hires.plan.memory import Room

FACTORS = (2, 4)
"""By how much microbatches and tiles are multiplied."""


@dataclass(frozen=True)
class Change:
    """Keys of a config that take other values."""

    keys: dict[str, Any]
    """By dotted name, as ``parallel.stages``."""

    @property
    def text(self) -> str:
        """The overrides as a user types them."""
        return " ".join(f"{key}={written(value)}" for key, value in self.keys.items())

    def apply(self, config: RunConfig) -> RunConfig | None:
        """Returns the changed config, or None if its values make no sense together."""
        try:
            return self.applied(config)
        except ConfigError:
            return None

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the changed config; ConfigError: its values make no sense together."""
        changed: RunConfig = _replaced(config, self.keys)
        return changed


def _replaced(section: Any, keys: dict[str, Any]) -> Any:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
    values = {key: value for key, value in keys.items() if "." not in key}
    values |= {group: _replaced(getattr(section, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(section, **values)


Ladder = Iterable[Change]
"""Changes of one kind, from near to far."""


def written(value: Any) -> str:
    """Returns a value as a user types it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).replace(" ", "")


def fewer_ranks(config: RunConfig, layers: int | None) -> list[Ladder]:
    """Returns all fewer replicas, stages (up to ``layers``), tiles and shards, the most first."""
    parallel, most = config.parallel, config.launcher.offered_ranks

    def below(count: int) -> Iterable[int]:
        # Each replica, stage or shard has a rank at least, so more than the offered never fit.
        return range(min(count - 1, most), 0, -1)

    return [
        _changes("parallel.replicas", below(parallel.replicas)),
        (stages(config, n) for n in below(parallel.stages) if layers is None or n <= layers),
        _grids(config, _trimmed),
        _changes("parallel.local_dp", below(parallel.local_dp)),
    ]


def less_memory(config: RunConfig, layers: int, room: Room) -> list[Ladder]:
    """Returns single changes that lower the memory.

    First what leaves the ranks as they are, by how little it slows them down. Where one rank needs
    too much, more ranks follow. Where all together do, more nodes go first, and fewer ranks before
    all but recomputation: each needs its libraries, whatever it holds.
    """
    parallel, launcher = config.parallel, config.launcher
    ranks, replicas = parallel.num_ranks, parallel.replicas
    microbatches = _changes("parallel.microbatches", (f * parallel.microbatches for f in FACTORS))
    kinds = ("block", "stage") if config.task.name == "train" else ()
    kinds_left = [kind for kind in kinds if kind != config.memory.checkpoint]
    recompute = [_changes("memory.checkpoint", [kind]) for kind in kinds_left]
    has_copies = ranks > parallel.stages or parallel.directions > 1
    divides = kinds and has_copies and not config.optimizer.shard
    shard = [_changes("optimizer.shard", [True])] if divides else []
    if not room.shared or room.devices:
        # One stage more, then twice as many each time, up to what layers and ranks allow. On GPUs
        # more ranks than these would share them.
        offered = launcher.offered_ranks
        offered = min(offered, room.nodes * room.devices) if room.devices else offered
        spare = offered // replicas - ranks // replicas
        most = min(layers, parallel.stages + spare // parallel.local_dp)
        counts = {parallel.stages + 1, most, *_doubled(parallel.stages, most)}
        more = [n for n in sorted(counts) if parallel.stages < n <= most]
        more_tiles = itertools.islice(_grids(config, _twice), len(FACTORS))
        return [microbatches, *shard, *recompute, [stages(config, n) for n in more], more_tiles]
    nodes = [*_doubled(launcher.nodes, ranks), ranks] if launcher.has_jobs else []
    return [
        _changes("launcher.nodes", (n for n in nodes if n > launcher.nodes)),
        *shard,
        *recompute[:1],
        _changes("parallel.replicas", _halves(replicas)),
        _grids(config, _half),
        [stages(config, n) for n in _halves(parallel.stages)],
        microbatches,
        *recompute[1:],
    ]


def _changes(key: str, values: Iterable[Any]) -> Ladder:
    return [Change({key: value}) for value in values]


def stages(config: RunConfig, count: int) -> Change:
    """Returns another number of stages; layers per stage that were given fit no other number."""
    freed = {} if config.parallel.balance is None else {"parallel.balance": None}
    return Change({"parallel.stages": count, **freed})


def _doubled(count: int, most: int) -> list[int]:
    return [n for shift in range(1, most.bit_length() + 1) if (n := count << shift) < most]


def _halves(count: int) -> list[int]:
    return [count >> shift for shift in range(1, count.bit_length())]


Grids = list[list[int]]


def _twice(grids: Grids) -> Grids:
    return [[r, 2 * c] if c < r else [2 * r, c] for r, c in grids]


def _half(grids: Grids) -> Grids:
    return [[r, max(1, c // 2)] if c >= r else [max(1, r // 2), c] for r, c in grids]


def _trimmed(grids: Grids) -> Grids:
    """Returns grids with one row or column less, off the longer side of the largest."""
    grids = [list(grid) for grid in grids]
    grid = max(grids, key=lambda grid: grid[0] * grid[1])
    if grid != [1, 1]:
        grid[grid[1] > grid[0]] -= 1
    return grids


def _grids(config: RunConfig, step: Callable[[Grids], Grids]) -> Iterator[Change]:
    """Yields the grids of one step, two steps and so on, until a step changes nothing.

    They are written as ``parallel.tiles`` is: one grid if all spatial stages share it.
    """
    parallel = config.parallel
    grids: Grids = parallel.tiles if parallel.listed else [parallel.tiles]
    while (after := step(grids)) != grids:
        grids = after
        yield Change({"parallel.tiles": grids if parallel.listed else grids[0]})


DEADLINE_S = 18.0
"""Seconds from the beginning of planning until the answer; no trial begins that would take longer,
judged by the longest one before. Most users would rather try for themselves than wait."""
MAX_TRIALS = 24
"""Most changes that one search plans and predicts."""
SHOWN_OUT = 4
"""Most changes that are named with the reason why they were not tried."""

_CONCERNS = {"parallel.replicas": "batch", "parallel.microbatches": "batch"}
"""Keys whose mistakes are findings of another key."""


class Measure(NamedTuple):
    """What a trial needs, in bytes or any other cost, and whether that is little enough."""

    fits: bool
    words: str
    """What it needs, as a user reads it."""


class Trial(NamedTuple):
    """A change that was planned and predicted."""

    change: Change
    ranks: int
    """Ranks of its world."""
    fits: bool
    words: str
    """The change, and what it needs."""


Bound = Callable[[RunConfig], str]
"""Returns why a config cannot fit, from its numbers alone; nothing if it may."""
Predict = Callable[[RunConfig], Measure | None]
"""Returns what a config needs, or None if it cannot be planned or predicted."""


@dataclass
class Budget:
    """How long a search may take and how much it may try."""

    deadline_s: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)
    """On the monotonic clock."""
    trials: int = MAX_TRIALS
    longest_s: float = 0.0
    """The longest trial so far."""
    spent: bool = False
    """Whether a trial was left out for lack of time or trials."""

    def allows_trial(self) -> bool:
        """Whether one more trial may begin, and counts it."""
        self.spent |= self.trials == 0 or time.monotonic() + self.longest_s >= self.deadline_s
        self.trials -= not self.spent
        return not self.spent


@dataclass
class Search:
    """Tries changes of one config until its budget is used; without ``predict`` all may fit."""

    config: RunConfig
    bound: Bound = lambda config: ""
    predict: Predict | None = None
    budget: Budget = field(default_factory=Budget)
    trials: list[Trial] = field(default_factory=list)
    """All changes that were predicted, in order."""
    out: dict[str, str] = field(default_factory=dict)
    """Why changes were not tried, by their text."""

    def first_of_each(self, ladders: Sequence[Ladder]) -> list[Change]:
        """Returns the nearest change of each ladder that is sensible and within the bound."""
        firsts = (next((c for c in ladder if self._possible(c)), None) for ladder in ladders)
        return [change for change in firsts if change is not None]

    def nearest(self, ladders: Sequence[Ladder]) -> list[Trial]:
        """Returns the changes that fit of the first rung on which any does, by change in ranks."""
        fitting: list[Trial] = []
        for rung in itertools.zip_longest(*ladders):
            trials = [self._try(change) for change in rung if change is not None]
            fitting = [trial for trial in trials if trial is not None and trial.fits]
            if fitting or self.budget.spent:
                break
        ranks = self.config.parallel.num_ranks
        fitting = [self._refined(trial) for trial in fitting]
        return sorted(fitting, key=lambda trial: abs(trial.ranks - ranks))

    def summary(self) -> str:
        """Returns in words what was tried, what was not and why, and whether the budget ran out."""
        tried = ", ".join(trial.words for trial in self.trials) or "nothing that makes a plan"
        text = f"tried{' until the time was used' if self.budget.spent else ''}: {tried}"
        if self.out:
            shown = [f"{what} ({why})" for what, why in self.out.items()][:SHOWN_OUT]
            more = len(self.out) - len(shown)
            text += f"; out without a trial: {', '.join(shown)}"
            text += f" and {more} more" if more else ""
        return text

    def _possible(self, change: Change) -> RunConfig | None:
        config = change.apply(self.config)
        if config is None or config.parallel.num_ranks > config.launcher.offered_ranks:
            return None
        problems, before = check_numbers(config), check_numbers(self.config)
        concerned = {*change.keys, *(_CONCERNS.get(key) for key in change.keys)}
        if len(problems) > len(before) or any(f.key in concerned for f in problems):
            return None
        reason = self.bound(config)
        if reason:
            self.out[change.text] = reason
            return None
        return config

    def _try(self, change: Change) -> Trial | None:
        """Returns the trial of a change; None if it is impossible or the budget is used."""
        config = self._possible(change)
        if config is None or self.predict is None or not self.budget.allows_trial():
            return None
        began_s = time.monotonic()
        need = self.predict(config)
        self.budget.longest_s = max(self.budget.longest_s, time.monotonic() - began_s)
        if need is None:
            return None
        words = f"{change.text} ({need.words})"
        self.trials.append(Trial(change, config.parallel.num_ranks, need.fits, words))
        return self.trials[-1]

    def _refined(self, trial: Trial) -> Trial:
        """Bisects from stages that fit to the nearest that did not; returns the last that fit."""
        key = "parallel.stages"
        far = trial.change.keys.get(key)
        if far is None:
            return trial
        own = self.config.parallel.stages
        missed = [t.change.keys[key] for t in self.trials if key in t.change.keys and not t.fits]
        near = min([own, *missed], key=lambda count: abs(far - count))
        while abs(far - near) > 1 and not self.budget.spent:
            middle = (near + far) // 2
            between = self._try(stages(self.config, middle))
            if between is not None and between.fits:
                trial, far = between, middle
            else:
                near = middle
        return trial
