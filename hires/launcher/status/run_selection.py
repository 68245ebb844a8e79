"""Resolves the names of campaigns and runs on a command line to run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store import campaign, file_names
from hires.core.store.file_names import StrPath, entries_of, exists, is_dir
from hires.core.store.rundir import locate
from hires.launcher.status.run_state import INFEASIBLE, PENDING, RunState


@dataclass
class Selection:
    """Some runs."""

    paths: list[Path] = field(default_factory=list)
    """Their folders, absolute, each once."""
    planned: list[RunState] = field(default_factory=list)
    """Points of their campaigns without a folder: they cannot run, or were not begun."""
    campaigns: list[Path] = field(default_factory=list)
    """Folders of the campaigns that were meant as a whole, absolute."""

    @property
    def whole_campaigns(self) -> list[Path]:
        """The campaigns all runs of which were chosen, and so what they planned."""
        folders = dict.fromkeys([*self.campaigns, *(path.parent for path in self.paths)])
        chosen = set(self.paths)
        return [f for f in folders if chosen.issuperset(_of_campaign(f).paths)]


def select(names: Sequence[str], results: StrPath = "results") -> Selection:
    """Returns the runs that some names mean; all campaigns if there are none.

    A campaign is named by its name or folder, a run by its folder, name or beginning of its hash.
    A name of neither, and one of several runs, is a ConfigError.
    """
    parts = [_named(name, Path(results)) for name in names]
    if not names:
        parts = [_of_campaign(folder) for folder in campaigns(results)]
    return Selection(
        list(dict.fromkeys(path for part in parts for path in part.paths)),
        list(dict.fromkeys(point for part in parts for point in part.planned)),
        list(dict.fromkeys(folder for part in parts for folder in part.campaigns)),
    )


def campaigns(results: StrPath = "results") -> list[Path]:
    """Returns the folders of all campaigns, in order."""
    return [entry.absolute() for entry in entries_of(results) if _is_campaign(entry)]


def _of_campaign(folder: Path) -> Selection:
    runs = [run.name for run in entries_of(folder) if exists(run / file_names.CONFIG)]
    plans = campaign.read(folder, [])
    planned = [
        RunState(None, point.run, folder.name, PENDING, cause="planned, and not begun")
        for point in plans.points
        if point.run not in runs
    ]
    for out in plans.excluded:
        name = " ".join(out.overrides) or "?"
        planned.append(RunState(None, name, folder.name, INFEASIBLE, cause=out.reason))
    return Selection([folder / name for name in runs], planned, [folder])


def _named(name: str, results: Path) -> Selection:
    for folder in (results / name, Path(name)):
        if name and _is_campaign(folder):
            return _of_campaign(folder.absolute())
    try:
        return Selection([locate(name, results)])
    except ConfigError as error:
        if "may be any of" in str(error):
            raise
        others = ", ".join(folder.name for folder in campaigns(results))
        there = f"the campaigns under {results}/ are {others}"
        there = there if others else f"there is no campaign under {results}/ at all"
        raise ConfigError(
            f"{name!r} is no campaign and no run: {there}; a run is named by its folder, its name "
            f"or the beginning of its hash"
        ) from None


def _is_campaign(folder: Path) -> bool:
    """Whether a folder holds runs, or the plan of a sweep."""
    if folder.name.startswith(".") or not is_dir(folder) or exists(folder / file_names.CONFIG):
        return False
    runs = (run for run in entries_of(folder) if exists(run / file_names.CONFIG))
    return exists(folder / file_names.CAMPAIGN) or any(runs)
