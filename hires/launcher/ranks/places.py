"""What starts the ranks, and where they meet: how launchers differ, as data."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_starter
from hires.core.ranks.meeting import address_of, is_loopback, own_address_towards
from hires.core.ranks.mpi_starter import Starter

LOOPBACK = "127.0.0.1"
"""Where the ranks of one machine meet."""


@dataclass(frozen=True)
class Preemption:
    """Why ranks are stopped before they are done, and what comes next."""

    reason: str = "preempted"
    """As ``exit.json`` has it: ``preempted``, ``timeout`` or ``node``."""
    cause: str = "it made way for others (SIGUSR2)"
    then: str = "start it again to resume there"
    patience_s: float = math.inf
    """How long the ranks may take to save their state and end."""
    requeued: bool = False
    """Whether the scheduler has queued the job again already."""


@dataclass(frozen=True)
class RankPlaces:
    """What starts the ranks of a world, and where they meet."""

    num_ranks: int
    port: int
    """Where they meet; 0: at any free port."""
    address: str = LOOPBACK
    """Where rank 0 listens on this machine."""
    interface: str | None = None
    """Network interface of the ranks' messages; unset: each rank finds out."""
    nodes: Sequence[str] = ()
    """Names of the machines, where a scheduler has chosen them."""
    starter: Starter | None = None
    """The one command that starts all ranks; unset: each is a child of this process."""
    preemption: Callable[[], Preemption] = Preemption
    """Called when SIGUSR2 arrives."""
    termination: Callable[[], Preemption | None] = lambda: None
    """Called when a scheduler may have sent SIGTERM, here or to the ranks; None: a user did."""
    gpus: Sequence[str] = ()
    """GPUs of this machine that the ranks see; empty: all."""


def here(num_ranks: int, port: int) -> RankPlaces:
    """Returns the places of ranks on this machine, which meet at ``port``; 0: at any free one."""
    return RankPlaces(num_ranks, port, interface=loopback())


def loopback() -> str | None:
    """Returns this machine's loopback interface, or None if it goes by another name.

    Without it gloo looks up this host's name, which may not resolve, or leads to a firewall.
    """
    return next((name for _, name in socket.if_nameindex() if name == "lo"), None)


def on_hosts(num_ranks: int, config: RunConfig, words: Sequence[str] = ()) -> RankPlaces:
    """Returns the places of ranks that one command starts, here or on ``launcher.hosts``.

    The command is ``words``, as launch.sh has them, or follows from the config. The ranks meet at
    the first host. A RunError: that is another machine, or the others do not reach it.
    """
    hosts = mpi_starter.hosts_of(config, num_ranks)
    if words:
        starter = Starter(mpi_starter.dialect_of(config), tuple(words))
    else:
        starter = mpi_starter.starter(config, hosts)
    places = dataclasses.replace(here(num_ranks, config.launcher.port), starter=starter)
    names = config.launcher.hosts
    if names and not is_this_machine(names[0]):
        raise RunError(
            f"rank 0 would run on {_host_label(names[0])}, which is not this machine: start the "
            f"run there"
        )
    if len(names) < 2:
        return places
    address, interface = meeting(config, "this machine", _host_label(names[1]), names[1])
    return dataclasses.replace(places, address=address, interface=interface)


def is_this_machine(name: str) -> bool:
    """Returns whether a name or address is one of this machine."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((name, 0))  # only an address of this machine can be taken
        return True
    return False


def _host_label(name: str) -> str:
    return f"{name} (launcher.hosts)"


def meeting(config: RunConfig, here: str, other: str, towards: str) -> tuple[str, str | None]:
    """Returns where the ranks of several machines meet, and the interface if one is named.

    That is this machine's address in the network that leads ``towards`` another; a RunError says
    that the other could reach none. ``here`` and ``other`` name the two in messages.
    """
    interface = config.interface
    if interface is not None:
        try:
            return address_of(interface), interface
        except OSError as error:
            key = "launcher" if config.launcher.interface else "cluster"
            raise RunError(
                f"{key}.interface={interface} has no IPv4 address on {here} ({error.strerror}); "
                f"name another one, or leave it out"
            ) from None
    remedy = "name the network that joins them, as launcher.interface=ib0"
    return _reached(towards, here, other, remedy), None


def _reached(towards: str, here: str, other: str, remedy: str) -> str:
    try:
        address = own_address_towards(towards)
        if not is_loopback(address):
            return address
        why = f"its name leads to {address}"
    except OSError as error:
        why = str(error)
    raise RunError(f"{here} finds no address that {other} could reach it at: {why}; {remedy}")
