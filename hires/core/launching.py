"""What can be configured about starting the ranks: on this machine, or as a Slurm job?

This section of the config stands alone because the ``slurm`` launcher has keys of its own; what
they mean to Slurm is in :mod:`hires.launcher.slurm`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hires.core.errors import ConfigError
from hires.core.values import Checks, at_least, one_of

LAUNCHERS = ("local", "slurm")


@dataclass
class LauncherConfig:
    """``launcher=NAME``: what starts the ranks."""

    name: str = "local"
    """``local``: one process per rank on this machine. ``slurm``: one Slurm job, whose ranks are
    spread evenly over ``nodes``, consecutive ranks together."""
    threads: int = 1
    """Compute threads of every rank; as many cores a rank are asked of Slurm."""
    max_ranks: int = 64
    """``local``: most processes on this machine; a larger world is refused."""
    port: int = 0
    """Rendezvous port; 0: a free one is chosen, in a Slurm job one that follows from its number."""
    nodes: int = 1
    """``slurm``: nodes of the job."""
    partition: str | None = None
    """``slurm``: partition; unset: the cluster's default."""
    account: str | None = None
    """``slurm``: account that pays; unset: the user's default."""
    qos: str | None = None
    """``slurm``: quality of service; unset: the cluster's default."""
    minutes: int = 60
    """``slurm``: time limit of the job; with ``pack`` of all its points together."""
    pack: int = 1
    """``slurm``: points of a sweep that share one job. They run one after the other, and side by
    side as far as their ranks times ``threads`` fit on the nodes. The job is sized for the largest
    of them, and points that differ only in their number of ranks may share one."""
    signal_s: int = 120
    """``slurm``: seconds before the time limit at which the ranks are told to make way (SIGUSR2);
    then the job is queued again and goes on as the run's next attempt. Slurm may tell them up to a
    minute earlier. A preempted job does the same, as far as the cluster gives it the time."""
    requeues: int = 3
    """``slurm``: how often a job that reached its time limit is queued again."""
    other_code: bool = False
    """``slurm``: whether a job may run with another version or commit of hires than planned it."""
    interface: str | None = None
    """``slurm``: network interface over which ranks of several nodes talk, as ``ib0``; unset: the
    one that leads to the first node."""

    def __post_init__(self) -> None:
        check = Checks()
        check(one_of, "launcher", self.name, LAUNCHERS)
        for key, low in (("threads", 1), ("max_ranks", 1), ("nodes", 1), ("minutes", 1)):
            check(at_least, f"launcher.{key}", getattr(self, key), low)
        check(at_least, "launcher.pack", self.pack, 1)
        check(at_least, "launcher.signal_s", self.signal_s, 10)
        check(at_least, "launcher.requeues", self.requeues, 0)
        for key in ("partition", "account", "qos", "interface"):
            check(_check_word, f"launcher.{key}", getattr(self, key))
        check.done()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"launcher.port={self.port} must be 0 (any free port) to 65535")
        if self.signal_s >= 60 * self.minutes:
            raise ConfigError(
                f"launcher.signal_s={self.signal_s} must be less than launcher.minutes="
                f"{self.minutes}, which are {60 * self.minutes} seconds"
            )

    @property
    def offered_ranks(self) -> int:
        """Most ranks that the launcher offers; what a cluster has is for Slurm to say."""
        return self.max_ranks if self.name == "local" else sys.maxsize


def _check_word(key: str, value: str | None) -> None:
    """Refuses text that no line of a job script can hold."""
    if value is not None and (not value or not value.isprintable()):
        raise ConfigError(f"{key}={value!r} must be a name on one line, or null")
