"""Defines a tracker: one class that shows the numbers of a training in a tool while it runs.

Rank 0 alone opens trackers, each in a thread of its own (:mod:`hires.engine.tracking`). To add one:
a module in ``hires.trackers`` with its class, and a row of its test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hires.core.programs import adding
from hires.core.registry import Registry

DONE, PREEMPTED, FAILED = "done", "preempted", "failed"
"""How an attempt ends, as far as its rank 0 can still say."""


@dataclass(frozen=True)
class TrackedRun:
    """The run whose numbers a tracker takes."""

    folder: Path
    """The run folder, absolute."""
    campaign: str
    name: str
    id: str
    """Letters and digits; attempts of one run share it, so that a tracker resumes that run."""
    first: int
    """Step at which this attempt begins."""
    keys: Mapping[str, Any]
    """What differs from the defaults of the config, by dotted keys."""


class Tracker:
    """A tool that takes numbers; what it raises in ``log`` and ``close`` costs no training."""

    package: ClassVar[str] = ""
    """What it imports in ``open``, if hires needs it for nothing else."""
    extra: ClassVar[str] = ""
    """The extra of hires that brings it; else it is installed by its own name."""
    remedy: ClassVar[str] = ""
    """What to look at if it cannot be opened."""

    @classmethod
    def lacks(cls) -> str | None:
        """Returns which package is missing here, and the remedy; None: none is."""
        if not cls.package or find_spec(cls.package) is not None:
            return None
        how = adding(cls.extra) if cls.extra else f"pip install {cls.package}"
        return f"{cls.package} is not installed; leave it out, or {how}"

    def open(self, run: TrackedRun) -> None:
        """Starts the run in the tool, or resumes it."""
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes finite numbers of a step, as ``train/loss``; steps never fall in an attempt."""
        raise NotImplementedError

    def close(self, status: str) -> None:
        """Writes what is left; the attempt is ``done``, ``preempted`` or ``failed``."""
        raise NotImplementedError


TRACKERS: Registry[type[Tracker]] = Registry("tracker", "hires.trackers")
"""Name in ``measure.track`` -> the tracker."""
