"""Turns the names of jobs, campaigns and runs into the value of sbatch's ``--dependency``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hires.core.errors import ConfigError
from hires.core.store.file_names import StrPath
from hires.launcher.slurm.scheduler import is_unknown
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import DONE, PENDING, RUNNING, RunState
from hires.launcher.status.state import states

_JOB = re.compile(r"\d+(_\d+)?")
_SHOWN = 3
"""Runs that one error names."""


def dependency(
    after: Sequence[str], after_any: Sequence[str], results: StrPath = "results"
) -> str | None:
    """Returns the value of sbatch's ``--dependency``, as ``Launcher.dependency`` describes it."""
    parts = [_condition("afterok", name, results) for name in after]
    parts += [_condition("afterany", name, results) for name in after_any]
    return ",".join(filter(None, parts)) or None


def _condition(kind: str, name: str, results: StrPath) -> str:
    option = "--after" if kind == "afterok" else "--after-any"
    if _JOB.fullmatch(name):
        # Slurm treats a job that it does not list as one that has ended well.
        if is_unknown(name):
            raise ConfigError(
                f"{option} {name}: Slurm lists no such job, or no longer; if it has ended as it "
                f"should, leave the option out"
            )
        return f"{kind}:{name}"
    chosen = select([name], results)
    points = [*states(chosen.paths), *chosen.planned]
    live = [state for state in points if state.state in (PENDING, RUNNING)]
    without = [state for state in live if state.job is None]
    if without:
        raise ConfigError(
            f"{option} {name}: {_named(without)} no Slurm job that could be waited for; submit "
            f"what is pending with launcher=slurm first, or wait until it has ended"
        )
    failed = [state for state in points if state not in live and state.state != DONE]
    if failed and kind == "afterok":
        raise ConfigError(
            f"{option} {name}: {_named(failed)} not done and will not be; mend it with "
            f"`hires retry {name}`, or use --after-any {name}"
        )
    jobs = dict.fromkeys(str(state.job) for state in live)
    return ":".join([kind, *jobs]) if jobs else ""


def _named(states_: Sequence[RunState]) -> str:
    names = ", ".join(state.name for state in states_[:_SHOWN])
    more = f" and {len(states_) - _SHOWN} more" if len(states_) > _SHOWN else ""
    return f"{names}{more} {'is' if len(states_) == 1 else 'are'}"
