"""Describes where every rank of a world runs, what starts it there, and where all ranks meet.

Launchers differ in nothing else while the ranks run, so it is data: the supervisor starts every
rank in the same way, with the words that its place puts before the command, or all of them with one
command.
"""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_dialects, network
from hires.core.ranks.mpi_dialects import Starter

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


def on_hosts(num_ranks: int, config: RunConfig, words: Sequence[str] = ()) -> RankPlaces:
    """Returns the places of ranks that one command starts, here or on ``launcher.hosts``.

    Args:
        num_ranks: how many there are.
        config: the frozen config.
        words: the command, as launch.sh has it; empty: the one that follows from the config.

    Raises:
        RunError: the first host is not this machine, or the others do not reach it.
    """
    hosts = mpi_dialects.hosts_of(config, num_ranks)
    if words:
        starter = Starter(mpi_dialects.dialect_of(config), tuple(words))
    else:
        starter = mpi_dialects.starter(config, hosts)
    places = dataclasses.replace(here(num_ranks, config.launcher.port), starter=starter)
    names = config.launcher.hosts
    if not names:
        return places
    _require_here(names[0])
    if len(names) == 1:
        return places
    address, interface = _meeting(config, names[1])
    ranks = [
        RankPlace(local, host.ranks, node=host.name)
        for host in hosts
        for local in range(host.ranks)
    ]
    return dataclasses.replace(places, ranks=ranks, address=address, interface=interface)


def _require_here(name: str) -> None:
    """Refuses a first host that is another machine: the ranks meet where the first one runs.

    Raises:
        RunError: names it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))  # only an address of this machine can be taken
        except OSError as error:
            raise RunError(
                f"launcher.hosts begins with {name}, which is not this machine ({error}); name "
                f"this one first, or start the run there"
            ) from None


def _meeting(config: RunConfig, other: str) -> tuple[str, str | None]:
    """Returns this machine's address for the others, and the interface if one is named."""
    interface = config.interface
    try:
        if interface is not None:
            return network.address_of(interface), interface
        address = network.own_address_towards(other)
    except OSError as error:
        where = f"interface {interface}" if interface else f"host {other}"
        raise RunError(
            f"this machine finds no address by {where} ({error}); name the network that joins the "
            f"hosts with launcher.interface"
        ) from None
    if network.is_loopback(address):
        raise RunError(
            f"{other} (launcher.hosts) leads to {address}, which no other machine reaches; name "
            f"the hosts by their addresses in the network that joins them"
        )
    return address, None
