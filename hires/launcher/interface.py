"""The interface of a launcher, and the registry of all launchers.

A launcher starts frozen runs. Those of this machine (``local``, ``mpirun``, ``torchrun``) start
the ranks while the command waits. The others submit the run to a scheduler as a job, whose number
stands in ``job.json`` of the attempt: ``{"launcher": "slurm", "job": "123", "index": 4, ...}``.

To add one: a module in :mod:`hires.launcher.kinds` with a registered subclass of
:class:`Launcher`, ``conf/launcher/NAME.yaml``, ``launch/NAME.sh``, and a test. A scheduler also
needs ``submit_many``, ``job_states`` and ``cancel``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.registry import Registry
from hires.core.store import file_names, provenance
from hires.core.store.attempts import Attempt, job_name
from hires.core.store.ends import End
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.core.store.rundir import RunDir
from hires.launcher.ranks.places import RankPlaces, here

Job = dict[str, Any]
"""The job of an attempt, as its ``job.json`` holds it."""
ENDED, GONE, UNKNOWN = "ended", "gone", "unknown"
"""States of a job that neither waits nor runs."""

OK, WARNING, FAILED = "ok", "warning", "failed"
"""States of a check of ``hires doctor``: it works, works with a limit, or runs will fail."""

OnLine = Callable[[dict[str, Any]], None]
"""Called with every new line of the ranks."""


@dataclass(frozen=True)
class JobStatus:
    """The state of one job, from its scheduler."""

    state: str
    """That of a run that waits or runs, or ``ENDED``, ``GONE`` or ``UNKNOWN`` (no answer)."""
    reason: str | None = None
    """Why it waits, why there is no answer, or how it ended: a key of ``JOB_ENDS`` if one fits."""
    expected: str | None = None
    """When it is expected to start, in the scheduler's words."""


@dataclass
class Check:
    """The result of one check of ``hires doctor``."""

    name: str
    state: str
    text: str
    remedy: str = ""
    """What would help."""
    where: str = "here"
    """Which machine it is about: ``here``, or ``job``: the nodes of a job together."""


class Share(NamedTuple):
    """A part of this machine: what an attempt needs, or what all that run at once may use."""

    attempts: int = 1
    cores: int = 1
    memory_bytes: float = 0


@dataclass(frozen=True)
class FrozenRun:
    """A run folder that is to be started here or submitted."""

    path: Path
    argv: tuple[str, ...] | None
    """The command line that makes this run alone, for its record; None: as its first attempt."""
    config: RunConfig
    attempts: int = 1
    """How many complete attempts its job is to make, one after the other."""
    needs_bytes: int = 0
    """Predicted memory of the host for all ranks with their libraries; 0: unknown."""
    done: int = 0
    """Complete attempts that it had when it was planned."""
    gpus: int = 0
    """GPUs that it takes here."""

    @property
    def ranks(self) -> int:
        """Ranks of its world."""
        return self.config.parallel.num_processes

    @property
    def needs(self) -> Share:
        """What an attempt of it takes of this machine."""
        return Share(1, self.ranks * self.config.launcher.threads, self.needs_bytes)


@dataclass(frozen=True)
class SubmitOptions:
    """What holds for all runs of one command, whose words are ``argv``."""

    argv: Sequence[str]
    limit: int | None = None
    """Most jobs that run at once; None: as many as the cluster allows."""
    after: str | None = None
    """What has to end before, from :meth:`Launcher.dependency`."""
    exclude: tuple[str, ...] = ()
    """Nodes that no job may run on."""


class Submitted(NamedTuple):
    """A run folder, and the name of its job, as ``123_4``, or why there is none."""

    path: Path
    job: str | None
    why: str | None


class Launcher(ABC):
    """Starts frozen runs in one way. Methods that a launcher does not override do nothing."""

    def dependency(
        self, after: Sequence[str], after_any: Sequence[str], results: StrPath
    ) -> str | None:
        """Returns what jobs wait for, in the scheduler's words; None: nothing.

        The jobs, campaigns and runs of ``after`` must have ended well, those of ``after_any`` in
        whatever state. A ConfigError: the launcher has no jobs, or a name is unknown.
        """
        if not (after or after_any):
            return None
        option = "--after" if after else "--after-any"
        raise ConfigError(
            f"{option} is about Slurm jobs; add launcher=slurm, or run one command after another"
        )

    def write_scripts(self, run: Path, config: RunConfig, argv: Sequence[str]) -> list[Path]:
        """Writes the scripts that the launcher needs; returns all that start the run by hand."""
        return [run / file_names.LAUNCH_SCRIPT]

    def start_estimate(self, config: RunConfig) -> str | None:
        """Returns when a run would start, in the scheduler's words; a ConfigError: never."""
        return None

    @abstractmethod
    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> str | None:
        """Submits a fresh attempt, to wait for ``after`` of :meth:`dependency`.

        Returns the name of its job; None if the launcher has no jobs. If the scheduler refuses it
        (a ConfigError) or does not answer (a RunError), the attempt's ``exit.json`` has the reason.
        """

    @abstractmethod
    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> End:
        """Returns how a run ended; without a job of :meth:`submit` it starts the ranks here.

        ``args`` are further words for every rank, only without jobs. A ConfigError says that the
        config's port is taken, a RunError that the ranks cannot be started.
        """

    def rank_places(
        self, config: RunConfig, num_ranks: int, words: Sequence[str] = ()
    ) -> RankPlaces:
        """Returns where the ranks of a run start that this process supervises; by default here.

        ``words`` are the command of launch.sh that starts all ranks; empty: that of the config.
        A RunError says why the ranks cannot be started from here.
        """
        return here(num_ranks, config.launcher.port)

    def submit_many(
        self,
        runs: Sequence[FrozenRun],
        options: SubmitOptions,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Submitted]:
        """Submits runs as jobs, and yields each; a failed one does not stop the others.

        No run has an attempt under way. ``stopped`` is called before every submission; if it
        returns True, no more are submitted.
        """
        return iter(())

    def job_states(self, jobs: Iterable[Job]) -> dict[str, JobStatus]:
        """Returns the state of each job, by its name (:func:`job_name`)."""
        return {}

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancels jobs; a RunError says why they cannot be cancelled."""
        raise RunError(f"the launcher {type(self).__name__} has no jobs that could be cancelled")

    def avoided_nodes(self, failed: Sequence[Attempt], configs: Sequence[RunConfig]) -> list[str]:
        """Returns the nodes that the next attempts should not use, after some of which failed."""
        return []

    def checks(self, config: RunConfig) -> list[Check]:
        """Returns the lines of ``hires doctor`` about what the launcher needs on this machine."""
        return []

    def node_checks(self, config: RunConfig, argv: Sequence[str], patience_s: float) -> list[Check]:
        """Returns what a small job on the nodes of ``config`` finds, which starts as runs do.

        It is cancelled after ``patience_s``, and before the KeyboardInterrupt of a signal.
        """
        return []


LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", "hires.launcher.kinds")


def all_launchers() -> list[Launcher]:
    """Returns every launcher."""
    return [LAUNCHERS[name]() for name in LAUNCHERS]


def launcher_named(name: str) -> Launcher:
    """Returns the launcher of a name; a ConfigError offers the others if there is none."""
    return LAUNCHERS[name]()


def launcher_of(config: RunConfig) -> Launcher:
    """Returns the launcher of a run; a ConfigError offers the others if there is none."""
    return launcher_named(config.launcher.name)


def note_job(launcher: str, attempt: Path, job: str, index: int | None = None) -> None:
    """Writes ``job.json`` into the folder of an attempt.

    ``job`` is the number of the job or, with the ``index`` of a task, of the job array.
    """
    values = {"launcher": launcher, "job": job, "index": index, "submitted": provenance.now()}
    write_atomically(attempt / file_names.JOB, json.dumps(values) + "\n")


def job_states(jobs: Iterable[Job]) -> dict[str, JobStatus]:
    """Returns the state of each job, by its name; each launcher is queried once."""
    states: dict[str, JobStatus] = {}
    for name, theirs in _by_launcher(jobs).items():
        answers, why = {}, f"{name} does not say"
        try:
            answers = launcher_named(name).job_states(theirs)
        except ConfigError as error:  # a launcher that is not installed here
            why = str(error)
        states |= {job_name(job): JobStatus(UNKNOWN, why) for job in theirs} | answers
    return states


def cancel_jobs(jobs: Iterable[Job]) -> None:
    """Cancels jobs; a RunError says why they cannot be cancelled."""
    for name, theirs in _by_launcher(jobs).items():
        launcher_named(name).cancel(theirs)


def _by_launcher(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(str(job.get("launcher")), []).append(job)
    return groups
