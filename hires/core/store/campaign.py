"""Reads and writes ``results/<campaign>/campaign.json``: what the sweeps of a campaign planned.

It holds the points that can run, each with the name of its run folder, and those that cannot, with
the reason. How far a point is stands in its run folder, never here. A writer holds :func:`locked`
from reading to writing, so that nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hires.core.config.fields import build
from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, files, provenance, reading
from hires.core.store.ends import State
from hires.core.store.file_names import exists
from hires.core.store.files import write_atomically
from hires.core.store.reading import Notes

SCHEMA = 1
PATIENCE_S = 120.0
"""How long the submission of another command is waited for: sbatch itself may take as long."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point that can run."""

    run: str
    """Name of its run folder, below that of the campaign."""
    overrides: list[str]
    """Words that make it alone, with ``hires run``."""
    repeat: int = 1
    """How many complete attempts the sweep wants."""


@dataclass(frozen=True)
class ExcludedPoint:
    """A point that cannot run (``infeasible``), or whose planning raised an error (``failed``)."""

    overrides: list[str]
    reason: str
    state: str = State.INFEASIBLE
    what: dict[str, Any] | None = None
    """Network, image, layout and the like, as the tables of runs call them; None: not recorded."""


@dataclass
class Campaign:
    """Everything that the sweeps of a campaign planned."""

    name: str
    sweeps: list[dict[str, Any]] = field(default_factory=list)
    """Command line, time and options of every sweep, in order."""
    points: list[PlannedPoint] = field(default_factory=list)
    excluded: list[ExcludedPoint] = field(default_factory=list)

    def add(
        self, sweep: dict[str, Any], points: list[PlannedPoint], excluded: list[ExcludedPoint]
    ) -> None:
        """Adds what a sweep planned; it replaces the same points of earlier sweeps."""
        self.sweeps.append(sweep)
        runs = {point.run: point for point in self.points}
        runs.update({point.run: point for point in points})
        self.points = list(runs.values())
        planned = {tuple(point.overrides) for point in self.points}
        out = {tuple(point.overrides): point for point in [*self.excluded, *excluded]}
        self.excluded = [point for words, point in out.items() if words not in planned]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Keeps other sweeps from a campaign's folder; yields a note if a stale lock was taken over.

    A RunError names the process of a sweep that is under way.
    """
    with files.lock(folder / file_names.SWEEP_LOCK, f"a sweep of campaign {folder.name!r}") as note:
        # One that is there was meant for an earlier sweep.
        (folder / file_names.STOP_SWEEP).unlink(missing_ok=True)
        files.remove_leftovers(folder)
        yield note


@contextlib.contextmanager
def starting(folders: Iterable[Path]) -> Iterator[None]:
    """Lets one command at a time check whether runs are under way, and start or submit them.

    It takes moments: the next command waits, and then sees what this one has started. A RunError
    names the process of a command that holds a campaign for long.
    """
    with contextlib.ExitStack() as stack:
        for folder in sorted(set(folders)):  # in one order, so that no two wait for each other
            what = f"a submission to campaign {folder.name!r}"
            stack.enter_context(files.lock(folder / file_names.SUBMIT_LOCK, what, PATIENCE_S))
            files.remove_leftovers(folder)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a sweep of the campaign is under way, as far as that can be seen from here."""
    return files.is_locked(folder / file_names.SWEEP_LOCK)


def stop(folder: Path) -> bool:
    """Cancels the sweep of a campaign; returns whether one is under way, or raises RunError."""
    if not is_locked(folder):
        return False
    write_atomically(folder / file_names.STOP_SWEEP, "")
    provenance.wake(sweep_process(folder))
    return True


def sweep_process(folder: Path) -> dict[str, Any]:
    """Returns the process of the campaign's sweep, as :func:`provenance.myself`; empty: none."""
    return files.holder_of(folder / file_names.SWEEP_LOCK) or {}


def is_stopped(folder: Path) -> bool:
    """Whether the sweep that holds the campaign was cancelled."""
    return exists(folder / file_names.STOP_SWEEP)


def read(folder: Path, notes: Notes = None) -> Campaign:
    """Returns the campaign of a folder; an empty one if no sweep has planned anything there.

    A file that is damaged or of another version is a RunError, or with ``notes`` one of these.
    """
    path = folder / file_names.CAMPAIGN
    try:
        values = reading.read_json(path, notes)
        if not values and (notes is not None or not exists(path)):
            return Campaign(folder.name)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise RunError(f"its schema is {schema!r}, this hires reads {SCHEMA}")
        values.pop("campaign", None)
        values["name"] = folder.name  # the folder may have been renamed or copied
        if not {"points", "excluded", "sweeps"} <= values.keys():
            raise RunError("a value is missing")
        return build(Campaign, values)
    except HiresError as error:
        if notes is not None:
            reading.damaged(path, str(error), notes)
            return Campaign(folder.name)
        raise RunError(
            f"{path} cannot be read ({error}); move it away: the runs beside it keep their results"
        ) from None


def write(folder: Path, campaign: Campaign) -> None:
    """Writes the campaign's file as a whole; raises RunError if it cannot be written."""
    values = asdict(campaign)
    values = {"schema": SCHEMA, "campaign": values.pop("name"), **values}
    write_atomically(folder / file_names.CAMPAIGN, json.dumps(values, indent=1) + "\n")
