"""Resolves the names of campaigns and runs on a command line to run folders.

A campaign is a folder of runs; what a sweep planned there is in its ``campaign.json``. Points that
cannot run, and those that were not begun, have no run folder and still belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store import campaign, file_names
from hires.core.store.file_names import StrPath
from hires.core.store.rundir import locate
from hires.launcher.status.run_state import INFEASIBLE, PENDING, RunState


@dataclass
class Selection:
    """Some runs."""

    paths: list[Path] = field(default_factory=list)
    """Their folders, absolute, each once."""
    planned: list[RunState] = field(default_factory=list)
    """Points without a folder."""
    campaigns: list[Path] = field(default_factory=list)
    """Folders of the campaigns that were meant as a whole, absolute."""


def select(names: Sequence[str], results: StrPath = "results") -> Selection:
    """Returns the runs that some names mean; all campaigns if there are none.

    Args:
        names: of campaigns (by name or folder) and runs (by folder, name or beginning of a hash).
        results: folder of all campaigns.

    Raises:
        ConfigError: a name is neither a campaign nor a run, or may be any of several runs.
    """
    if names:
        parts = [_named(name, Path(results)) for name in names]
    else:
        parts = [of_campaign(folder) for folder in campaigns(results)]
    paths = [path for part in parts for path in part.paths]
    planned = [point for part in parts for point in part.planned]
    folders = dict.fromkeys(folder for part in parts for folder in part.campaigns)
    return Selection(list(dict.fromkeys(paths)), list(dict.fromkeys(planned)), list(folders))


def campaigns(results: StrPath = "results") -> list[Path]:
    """Returns the folders of all campaigns, in order."""
    try:
        folders = sorted(entry for entry in Path(results).iterdir() if _is_campaign(entry))
    except OSError:
        return []
    return [folder.absolute() for folder in folders]


def of_campaign(folder: Path) -> Selection:
    """Returns all points of a campaign."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    paths = [folder / name for name in names if (folder / name / file_names.CONFIG).exists()]
    found = Selection(paths, campaigns=[folder])
    there = {path.name for path in found.paths}
    plans = campaign.read(folder, [])
    for point in plans.points:
        if point.run not in there:
            cause = "planned, and not begun"
            found.planned.append(RunState(None, point.run, folder.name, PENDING, cause=cause))
    for out in plans.excluded:
        name = " ".join(out.overrides) or "?"
        found.planned.append(RunState(None, name, folder.name, INFEASIBLE, cause=out.reason))
    return found


def whole_campaigns(names: Sequence[str], results: StrPath, paths: Sequence[Path]) -> list[Path]:
    """Returns the campaigns all runs of which were chosen, and so what they planned.

    Args:
        names: as a person said them; none: all campaigns.
        results: folder of all campaigns.
        paths: the runs that these names mean.
    """
    told = [folder for name in names for folder in (Path(results) / name, Path(name))]
    named = [folder.absolute() for folder in told if (folder / file_names.CAMPAIGN).is_file()]
    every = [*(named if names else campaigns(results)), *(path.parent for path in paths)]
    chosen = set(paths)
    return [
        folder for folder in dict.fromkeys(every) if chosen.issuperset(of_campaign(folder).paths)
    ]


def _named(name: str, results: Path) -> Selection:
    """Returns what one name means."""
    for folder in (results / name, Path(name)):
        if name and _is_campaign(folder):
            return of_campaign(folder.absolute())
    try:
        return Selection([locate(name, results)])
    except ConfigError as error:
        if "may be any of" in str(error):
            raise
        known = [folder.name for folder in campaigns(results)]
        there = f"the campaigns under {results}/ are {', '.join(known)}" if known else ""
        there = there or f"there is no campaign under {results}/ at all"
        raise ConfigError(
            f"{name!r} is no campaign and no run: {there}; a run is named by its folder, its name "
            f"or the beginning of its hash"
        ) from None


def _dicts(values: Any) -> list[dict[str, Any]]:
    """Returns the entries of a list that hold keys; none of what is no list."""
    return (
        [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    )


def _is_campaign(folder: Path) -> bool:
    """Whether a folder holds runs, or the plan of a sweep."""
    if folder.name.startswith(".") or not folder.is_dir() or (folder / file_names.CONFIG).exists():
        return False
    return (folder / file_names.CAMPAIGN).exists() or any(folder.glob(f"*/{file_names.CONFIG}"))
