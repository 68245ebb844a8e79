"""On which machine does every rank run, what starts it there, and where do all of them meet?

That is all in which launchers differ while the ranks run, so it is data: the supervisor starts
every rank in the same way, through the words that its place puts before the command.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hires.core.ranks.mpi_dialects import Starter
from hires.core.ranks.world import World

LOOPBACK = "127.0.0.1"
"""Where the ranks of one machine meet."""
_ANY_PORT_TRIES = 3


@dataclass(frozen=True)
class Place:
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
class Making:
    """Why ranks are asked to make way before they are done."""

    reason: str = "preempted"
    """As ``exit.json`` has it: ``preempted``, ``timeout`` or ``node``."""
    cause: str = "it made way for others (SIGUSR2)"
    then: str = "start it again and it goes on there"
    """What comes next."""
    patience_s: float = math.inf
    """How long the ranks may take to save their state and end."""


@dataclass(frozen=True)
class Places:
    """Where the ranks of a world run, and where they meet."""

    ranks: Sequence[Place]
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
    making_way: Callable[[], Making] = Making
    """Asked when SIGUSR2 arrives."""
    stopped: Callable[[], Making | None] = lambda: None
    """Asked when SIGTERM arrives, here or at a rank: was it a scheduler that needs the machine for
    something else? None: somebody wants the run to end."""

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


def here(num_ranks: int, port: int) -> Places:
    """Returns the places of ranks that are processes of this machine.

    Args:
        num_ranks: how many there are.
        port: where they meet; 0: any free port.
    """
    ranks = [Place(rank, num_ranks) for rank in range(num_ranks)]
    return Places(ranks, (port,) if port else (0,) * _ANY_PORT_TRIES, interface=loopback())


def loopback() -> str | None:
    """Returns this machine's loopback interface, or None if it goes by another name.

    Without it gloo asks for this host's name, which may not resolve, or leads to a firewall.
    """
    return next((name for _, name in socket.if_nameindex() if name == "lo"), None)
