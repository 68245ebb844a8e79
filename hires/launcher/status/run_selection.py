"""Resolves the names of campaigns and runs on a command line to run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.store import campaign, reading
from hires.core.store.ends import State
from hires.core.store.file_names import StrPath
from hires.core.store.run_names import NamedRuns, campaigns, matching, of_campaign
from hires.launcher.status.state import RunState


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
        return [f for f in folders if chosen.issuperset(of_campaign(f))]


def select(names: Sequence[str], results: StrPath = "results") -> Selection:
    """Returns the runs that some names mean; all campaigns if there are none.

    A name of neither runs nor a campaign, and one that may mean several, is a ConfigError.
    """
    every = campaigns(results)
    runs = NamedRuns([run for folder in every for run in of_campaign(folder)], every)
    if names:
        runs = matching(names, results)
    planned = dict.fromkeys(point for folder in runs.campaigns for point in _planned(folder))
    return Selection(runs.paths, [*planned], runs.campaigns)


def _planned(folder: Path) -> list[RunState]:
    """Returns the points of a campaign that have no run folder."""
    runs = {run.name for run in of_campaign(folder)}
    plans = campaign.read(folder, reading.Warned())
    planned = [
        RunState(None, point.run, folder.name, State.PENDING, cause="planned, and not begun")
        for point in plans.points
        if point.run not in runs
    ]
    for out in plans.excluded:
        name = " ".join(out.overrides) or "?"
        planned.append(RunState(None, name, folder.name, out.state, cause=out.reason))
    return planned
