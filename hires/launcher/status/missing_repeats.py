"""Counts the complete attempts that each point of a campaign lacks, by its ``campaign.json``.

A sweep with ``--repeat 3`` wants three of every point. A repeat that failed leaves the run done, so
the state alone does not show that one is missing.
"""

from __future__ import annotations

from pathlib import Path

from hires.core.store import campaign
from hires.core.store.rundir import done_attempts


class Repeats:
    """The repeats that campaigns want; the file of each campaign is read once."""

    def __init__(self) -> None:
        self._wanted: dict[Path, dict[str, int]] = {}

    def wanted(self, run: Path) -> int:
        """Returns how many complete attempts of a run were asked for; 1 if no sweep says."""
        folder = run.parent
        if folder not in self._wanted:
            points = campaign.read(folder, []).points
            self._wanted[folder] = {point.run: point.repeat for point in points}
        return self._wanted[folder].get(run.name, 1)

    def missing(self, run: Path) -> int:
        """Returns how many of them a run that is done lacks."""
        wanted = self.wanted(run)
        return max(0, wanted - len(done_attempts(run))) if wanted > 1 else 0
