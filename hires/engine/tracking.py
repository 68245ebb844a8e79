"""Hands the numbers of a training to trackers while it runs.

    all ranks      sum the losses of a step
    rank 0         puts its numbers into the queue of each tracker
    a thread of    takes them out in order, and logs them
    each tracker

No step waits for a server, and what fails in a tracker is a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hires import comm
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.evaluation_summary import LOSS, METRICS
from hires.core.store import naming, rundir
from hires.core.store.attempts import Attempt
from hires.core.trackers import FAILED, TRACKERS, TrackedRun, Tracker

log = logging.getLogger(__name__)

Call = Callable[[Tracker], None]

_WAITING = 10_000
"""Steps whose numbers a tracker keeps while its server is away."""
_CLOSE_S = 30.0
"""Less than the other ranks wait for rank 0."""


class Tracking:
    """Takes what ranks know of each step; rank 0 hands it on. All ranks make the same calls."""

    def __init__(self, config: RunConfig) -> None:
        self.names = dict.fromkeys(config.measure.track if config.task.name == "train" else ())
        self._batch, self._holders = config.batch, 0.0
        self.feeds: list[_Feed] = []
        self.status = FAILED
        """How the attempt ends, for the trackers."""

    def step(self, step: int, step_s: float, loss: float | None, facts: Mapping[str, Any]) -> None:
        """Takes a step of this rank: its seconds, its loss, and its rate, scale and norm."""
        if not self.names:
            return
        if not self._holders:  # as many ranks know the loss of their replica as in every step
            self._holders = comm.sum_all(0.0 if loss is None else 1.0)
        mean = comm.sum_all(0.0 if loss is None else loss) / self._holders
        numbers = {"train/loss": mean, "train/images_per_s": self._batch / step_s}
        self._put(step, numbers | {f"train/{key}": float(one) for key, one in facts.items()})

    def evaluation(self, step: int, facts: Mapping[str, Any]) -> None:
        """Takes what an evaluation behind a step has found."""
        found = {key: facts[key] for key in (LOSS, *METRICS) if facts.get(key) is not None}
        self._put(step, {f"validation/{key}": float(one) for key, one in found.items()})

    def _put(self, step: int, numbers: Mapping[str, float]) -> None:
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        for feed in self.feeds:
            feed.put(lambda tracker: tracker.log(step, finite))


def import_packages(config: RunConfig) -> None:
    """Imports what trackers need: their libraries are no memory of the training."""
    for package in (TRACKERS[name].package for name in config.measure.track):
        if package and importlib.util.find_spec(package):  # the tracker reports a missing one
            importlib.import_module(package)


@contextlib.contextmanager
def tracked(config: RunConfig, run_dir: Path, first: int, rank: int) -> Iterator[Tracking]:
    """Opens the trackers of an attempt that begins at a step, and closes them at its end.

    ConfigError: one of them cannot be opened.
    """
    tracking = Tracking(config)
    try:
        for name in tracking.names if rank == 0 else ():
            tracking.feeds.append(_Feed(name, _tracked_run(config, run_dir, first)))
        yield tracking
    finally:
        for feed in tracking.feeds:
            feed.put(lambda tracker: tracker.close(tracking.status))
            feed.put(None)
        for feed in tracking.feeds:
            feed.join()


class _Feed:
    """A tracker, and the thread that calls it."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name, self._tracker, self._warned = name, TRACKERS[name](), False
        wrong = self._tracker.lacks()
        try:
            if not wrong:
                self._tracker.open(run)
        except Exception as error:
            remedy = f"{self._tracker.remedy}, or leave it out".removeprefix(", or ")
            wrong = f"it cannot be opened ({type(error).__name__}: {error}); {remedy}"
        if wrong:
            raise ConfigError(f"measure.track={name}: {wrong}")
        self._queue: queue.Queue[Call | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Call | None) -> None:
        """Has the thread call the tracker, or end."""
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._warn(f"{_WAITING} steps wait for it")

    def join(self) -> None:
        """Waits for the thread."""
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"the last ones were not taken in {_CLOSE_S:.0f} s")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call(self._tracker)
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, cause: str) -> None:
        if not self._warned:
            text = "measure.track=%s loses numbers while the training continues: %s"
            log.warning(text, self._name, cause)
        self._warned = True


def _tracked_run(config: RunConfig, run_dir: Path, first: int) -> TrackedRun:
    # Of a folder that is made anew, and of a run that is complete and repeated, it is another.
    began = Attempt(run_dir, 0).env.get("started")
    text = f"{run_dir.name} {began} {rundir.done_attempts(run_dir)}"
    keys = naming.leaves(naming.identity(naming.plain(config)))
    number = hashlib.sha256(text.encode()).hexdigest()[:16]
    return TrackedRun(run_dir.absolute(), config.campaign, run_dir.name, number, first, keys)
