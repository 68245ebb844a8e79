"""Prepares a run: fills in what its keys leave open, and names and plans it before it starts.

keys -> data, layout, scales -> inputs and folder -> earlier runs -> plan
prepare                 name                 plan_run
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hires.cli.calibration import with_scales
from hires.cli.choosing import LayoutSearch, choice_note, explicit, plain_choice
from hires.cli.compose.idle_keys import idle_keys
from hires.cli.data_keys import training_overlap, with_classes
from hires.cli.earlier_runs import EarlierRuns, begin
from hires.cli.planning import Planner
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, rundir
from hires.core.store.files import write_atomically
from hires.core.store.frozen import RunInputs
from hires.plan.plan import Finding
from hires.plan.search.choice import Choice


@dataclass
class Prepared:
    """A run before it starts."""

    config: RunConfig
    argv: Sequence[str]
    """The command that makes it again, with the keys of a layout that was chosen."""
    choice: Choice | None = None
    """What its layout was chosen from; None: it was given."""
    findings: list[Finding] = field(default_factory=list)
    inputs: RunInputs = field(default_factory=RunInputs)
    path: Path = Path()
    """Its run folder, there or not, once it is named."""
    done: list[int] = field(default_factory=list)
    """Attempts that completed it earlier."""
    notes: list[str] = field(default_factory=list)
    """About earlier runs that it resembles."""

    def name(self, planner: Planner) -> None:
        """Finds the inputs, the folder, and which attempts are complete; errors of ``inputs``."""
        self.inputs = planner.inputs(self.config)
        self.path = rundir.run_path(self.config, self.inputs)
        self.done = rundir.done_attempts(self.path)

    def begin(self, earlier: EarlierRuns, go_on: bool) -> None:
        """Compares it with earlier runs; with ``go_on`` it begins where a shorter one was saved."""
        begun = begin(self.config, self.path, self.inputs, earlier, go_on)
        self.config, self.notes = begun

    def assumes(self, folder: str) -> bool:
        """Whether its scales stand in a folder for those of a calibration that was not run."""
        return Path(self.config.quant.scales or ".").parent == Path(folder)

    def keep_choice(self) -> None:
        """Writes what its layout was chosen from into its folder, which is there."""
        if self.choice is not None:
            text = json.dumps(plain_choice(self.choice), indent=1) + "\n"
            write_atomically(self.path / file_names.CHOICE, text)


def prepare(
    config: RunConfig,
    words: Iterable[str],
    planner: Planner,
    argv: Sequence[str],
    assumed: str | None = None,
) -> Prepared:
    """Returns a run whose data, layout and scales are known, with findings about its keys.

    Args:
        config: as the keys compose it.
        words: the overrides that the user typed.
        planner: traces and plans.
        argv: the whole command.
        assumed: folder for scales that stand for those of a calibration, which is then not run.

    Raises:
        ConfigError: the keys do not fit the data, the network or each other.
        PlanError: no layout fits.
        RunError: the calibration failed.
    """
    words = tuple(words)
    config = with_classes(config, planner.sizes)
    findings = [*idle_keys(config, words)]
    config, choice = LayoutSearch(planner, words).chosen(config)
    if choice is not None:
        argv = explicit(argv, config, choice)
        findings.append(choice_note(choice))
    config, finding = with_scales(config, planner, words, argv, assumed)
    findings += [] if finding is None else [finding]
    return Prepared(config, argv, choice, [*findings, *training_overlap(config)])
