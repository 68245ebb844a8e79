"""Describes where every rank of a world runs, what starts it there, and where all ranks meet.

Launchers differ in nothing else while the ranks run, so it is data: the supervisor starts every
rank in the same way, with the words that its place puts before the command.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hires.core.ranks.mpi_dialects import Starter
from hires.core.ranks.world import World

LOOPBACK = "127.0.0.1"
"""Where the ranks of one machine meet."""
_ANY_PORT_TRIES = 3


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    local_rank: int
    """The rank among those on the same machine."""
    local_size: int
    """Ranks on this machine."""
    prefix: tuple[str, ...] = ()
    """Words before the rank's own command."""
    node: str | None = None
    """Name of the machine, where it may be another one."""


@dataclass(frozen=True)
class Preemption:
    """Why ranks are stopped before they are done, and what comes next."""

    reason: str = "preempted"
    """As ``exit.json`` has it: ``preempted``, ``timeout`` or ``node``."""
    cause: str = "it made way for others (SIGUSR2)"
    then: str = "start it again and it goes on there"
    """What comes next."""
    patience_s: float = math.inf
    """How long the ranks may take to save their state and end."""
    requeued: bool = False
    """Whether the scheduler has queued the job again already."""


@dataclass(frozen=True)
class RankPlaces:
    """Where the ranks of a world run, and where they meet."""

    ranks: Sequence[RankPlace]
    """One for each rank."""
    ports: Sequence[int]
    """Ports to meet at, of which the next is tried if one is taken; 0: any free one."""
    address: str = LOOPBACK
    """Host where rank 0 listens, which is this one."""
    interface: str | None = None
    """Network interface of the ranks' messages; unset: each rank finds out."""
    relayed: bool = False
    """Whether the prefix starts a program that starts the rank, and passes on signals and how the
    rank ended, a signal as 128 plus its number."""
    starter: Starter | None = None
    """The one command that starts all ranks; unset: each is started with its place's prefix."""
    preemption: Callable[[], Preemption] = Preemption
    """Called when SIGUSR2 arrives."""
    termination: Callable[[], Preemption | None] = lambda: None
    """Called when SIGTERM arrives, here or at a rank; None: a user ended the run, not a scheduler
    that needs the machine."""

    def world(self, rank: int, port: int, attempt: int) -> World:
        """Returns one rank's view of all."""
        place = self.ranks[rank]
        return World(
            rank=rank,
            size=len(self.ranks),
            local_rank=place.local_rank,
            local_size=place.local_size,
            address=self.address,
            port=port,
            attempt=attempt,
        )


def here(num_ranks: int, port: int) -> RankPlaces:
    """Returns the places of ranks that are processes of this machine.

    Args:
        num_ranks: how many there are.
        port: where they meet; 0: any free port.
    """
    ranks = [RankPlace(rank, num_ranks) for rank in range(num_ranks)]
    return RankPlaces(ranks, (port,) if port else (0,) * _ANY_PORT_TRIES, interface=loopback())


def loopback() -> str | None:
    """Returns this machine's loopback interface, or None if it goes by another name.

    Without it gloo looks up this host's name, which may not resolve, or leads to a firewall.
    """
    return next((name for _, name in socket.if_nameindex() if name == "lo"), None)


def rank_environment(
    base: Mapping[str, str],
    world: World,
    threads: int,
    interface: str | None,
    site: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the environment variables of a rank.

    Args:
        base: what it inherits.
        world: which rank it is.
        threads: its compute threads.
        interface: network interface of its messages, unless ``base`` names one; None: it finds out.
        site: variables of the cluster's file, for those that ``base`` does not name.
    """
    # Under torchrun these make torch expect a store that another process hosts, and none does.
    environ = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_")}
    environ |= world.to_environment()
    environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return {**(site or {}), **environ}
