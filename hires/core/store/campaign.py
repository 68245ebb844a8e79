"""What did the sweeps of a campaign plan? One file says so: ``results/<campaign>/campaign.json``.

It holds the points that can run, each with the name of its run folder, and those that cannot, with
the reason. How far a point is stands in its run folder, never here. Whoever writes it holds
:func:`locked` from reading to writing, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store import file_names, lock
from hires.core.store.files import write_atomically

SCHEMA = 1
FILE = file_names.CAMPAIGN
_LOCK = file_names.SWEEP_LOCK
_SUBMIT = file_names.SUBMIT_LOCK
_STOP = file_names.STOP_SWEEP
PATIENCE_S = 120.0
"""How long the submission of another command is waited for: sbatch itself may take as long."""


@dataclass(frozen=True)
class Point:
    """A point that can run."""

    run: str
    """Name of its run folder, below that of the campaign."""
    overrides: list[str]
    """Words that make it alone, with ``hires run``."""
    repeat: int = 1
    """How many complete attempts were asked for."""


@dataclass(frozen=True)
class Excluded:
    """A point that cannot run."""

    overrides: list[str]
    reason: str
    nearest: str | None = None
    """What to change to come to the nearest point of the sweep that can run."""
    state: str = "infeasible"
    what: dict[str, Any] | None = None
    """Network, image, layout and the like, as the tables of runs call them; None: not recorded."""


@dataclass
class Campaign:
    """Everything that the sweeps of a campaign planned."""

    name: str
    points: list[Point] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    sweeps: list[dict[str, Any]] = field(default_factory=list)
    """Command line, time and options of every sweep, in order."""

    def add(self, sweep: dict[str, Any], points: list[Point], excluded: list[Excluded]) -> None:
        """Adds what a sweep planned; it replaces what earlier ones said about the same points."""
        self.sweeps.append(sweep)
        runs = {point.run: point for point in self.points}
        runs.update({point.run: point for point in points})
        self.points = list(runs.values())
        planned = {tuple(point.overrides) for point in self.points}
        out = {tuple(point.overrides): point for point in [*self.excluded, *excluded]}
        self.excluded = [point for words, point in out.items() if words not in planned]


def folder_of(config: RunConfig) -> Path:
    """Returns the folder of the campaign that a run belongs to."""
    return Path(config.results).absolute() / config.campaign


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Keeps other sweeps from a campaign's folder; yields a note if a stale lock was taken over.

    Raises:
        RunError: another sweep is under way; its process is named.
    """
    with lock.held(folder / _LOCK, f"a sweep of campaign {folder.name!r}") as note:
        (folder / _STOP).unlink(missing_ok=True)  # it was meant for an earlier sweep
        yield note


@contextlib.contextmanager
def starting(folders: Iterable[Path]) -> Iterator[None]:
    """Lets one command at a time look whether runs are under way, and start or submit them.

    It is held for moments: the next command waits, and then sees what this one has started.

    Args:
        folders: of the campaigns.

    Raises:
        RunError: another command holds a campaign for long; its process is named.
    """
    with contextlib.ExitStack() as stack:
        for folder in sorted(set(folders)):  # in one order, so that no two wait for each other
            what = f"a submission to campaign {folder.name!r}"
            stack.enter_context(lock.waited(folder / _SUBMIT, what, PATIENCE_S))
        yield


def stop(folder: Path) -> bool:
    """Tells the sweep of a campaign that it was cancelled; returns whether one is under way.

    Raises:
        RunError: the folder cannot be written.
    """
    if not is_locked(folder):
        return False
    write_atomically(folder / _STOP, "")
    return True


def is_stopped(folder: Path) -> bool:
    """Whether the sweep that holds the campaign was cancelled."""
    return (folder / _STOP).exists()


def is_locked(folder: Path) -> bool:
    """Whether a sweep of the campaign is under way, as far as that can be seen from here."""
    return lock.is_held(folder / _LOCK)


def read(folder: Path) -> Campaign:
    """Returns the campaign of a folder; an empty one if no sweep has planned anything there.

    Raises:
        RunError: the file is damaged or of another version.
    """
    path = folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Campaign(folder.name)
    except (OSError, ValueError) as error:
        raise RunError(_damaged(path, str(error))) from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise RunError(_damaged(path, f"its schema is {schema!r}, this hires reads {SCHEMA}"))
    try:
        points = [Point(**point) for point in values["points"]]
        excluded = [Excluded(**point) for point in values["excluded"]]
        return Campaign(folder.name, points, excluded, list(values["sweeps"]))
    except (KeyError, TypeError) as error:
        raise RunError(_damaged(path, str(error))) from None


def write(folder: Path, campaign: Campaign) -> None:
    """Writes the campaign's file; readers see the old one or the new one.

    Raises:
        RunError: it cannot be written.
    """
    values = {"schema": SCHEMA, "campaign": campaign.name, "sweeps": campaign.sweeps}
    values["points"] = [asdict(point) for point in campaign.points]
    values["excluded"] = [asdict(point) for point in campaign.excluded]
    write_atomically(folder / FILE, json.dumps(values, indent=1) + "\n")


def _damaged(path: Path, why: str) -> str:
    """Returns what to say about a file that cannot be read."""
    return f"{path} cannot be read ({why}); move it away: the runs beside it keep their results"
