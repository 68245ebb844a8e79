"""How do the verbs that run ranks start them, and what do they say if that fails?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.cli.screens.progress_bar import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, records
from hires.core.store.rundir import RunDir
from hires.launcher.interface import Outcome, launcher_of
from hires.launcher.supervision.watchdog import FILE, head


def launched(config: RunConfig, run: RunDir, world: int, args: Sequence[str] = ()) -> Outcome:
    """Returns how an attempt ended, after its ranks are gone; shows the steps meanwhile.

    Args:
        config: the frozen config.
        run: the folder and its fresh attempt.
        world: number of ranks.
        args: further words for every rank.

    Raises:
        ConfigError: the port that the config names is taken.
        RunError: the ranks cannot be started.
    """
    with StepProgress(world, config.batch, config.steps) as progress:
        return launcher_of(config).wait(run, None, progress, args)


def explain(outcome: Outcome, run: RunDir, keep: bool = True) -> None:
    """Says why an attempt failed; nothing if it did not.

    Args:
        outcome: how the attempt ended.
        run: its folder.
        keep: whether the folder is still there afterwards, so that it may be named.
    """
    if outcome.exit_code == 0:
        return
    print(f"hires: the run {_ENDS[outcome.state]}: {outcome.cause}", file=sys.stderr)
    page = head(run.attempt_dir) if outcome.reason == "hang" else []
    for line in page[2:]:  # the cause, with which it begins, is said already
        print(f"  {line}", file=sys.stderr)
    if page and keep:
        print(f"the whole page: {run.attempt_dir / FILE}", file=sys.stderr)
    if outcome.tail:
        print(f"last lines of rank {outcome.failed_rank}:", file=sys.stderr)
        for line in outcome.tail:
            print(f"  {line}", file=sys.stderr)
    if keep:
        print(f"all lines: {run.attempt_dir / 'logs'}", file=sys.stderr)


def warn_of_checkpoints(run: RunDir) -> None:
    """Says which checkpoints an attempt could not write, or found damaged."""
    for line in records.read_lines(run.attempt_dir / file_names.EVENTS):
        if line.get("event") == "checkpoint_failed":
            print(f"warning: no checkpoint of step {line['step']}: {line['text']}", file=sys.stderr)
        elif line.get("event") == "checkpoint_damaged":
            print(f"warning: {line['text']}", file=sys.stderr)


_ENDS = {"failed": "failed", "cancelled": "was cancelled", "lost": "is lost"}
