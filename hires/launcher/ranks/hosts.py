"""Places the ranks of a run that is no Slurm job, and chooses the command that starts them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_dialects, network
from hires.core.ranks.mpi_dialects import Starter
from hires.launcher.ranks.places import RankPlace, RankPlaces, here
from hires.launcher.slurm import allocation


def places(num_ranks: int, config: RunConfig, words: Sequence[str] = ()) -> RankPlaces:
    """Returns where the ranks of a run start, and by which command if one starts all.

    Args:
        num_ranks: ranks of the world.
        config: the frozen config.
        words: the command, as launch.sh has it; empty: the one that follows from the config.

    Raises:
        RunError: the other machines do not reach this one, the first host is not this one, or there
            is no job around it.
    """
    if mpi_dialects.starts_itself(config):
        name = mpi_dialects.dialect_of(config)
        hosts = mpi_dialects.hosts_of(config, num_ranks)
        command = Starter(name, tuple(words)) if words else mpi_dialects.starter(config, hosts)
        return dataclasses.replace(_on_hosts(num_ranks, config), starter=command)
    if config.launcher.name == "mpirun":
        return _in_job(num_ranks, config)
    return here(num_ranks, config.launcher.port)


def _in_job(num_ranks: int, config: RunConfig) -> RankPlaces:
    """Returns the places in the Slurm job around this process, which srun needs.

    Raises:
        RunError: there is none, or this is not its first node.
    """
    try:
        job = allocation.current()
    except RunError as error:
        raise RunError(
            f"launcher.mpi=srun starts ranks inside a Slurm job ({error}); start it in one, as "
            f"`salloc` gives, or use launcher=slurm"
        ) from None
    first = job.nodes[0]
    if socket.gethostname().split(".")[0] != first.host.split(".")[0]:
        raise RunError(
            f"rank 0 runs on {first.name}, where the others meet it, but this is "
            f"{socket.gethostname()}; start it there, or use launcher=slurm"
        )
    return job.places(num_ranks, config)


def _on_hosts(num_ranks: int, config: RunConfig) -> RankPlaces:
    """Returns the places on this machine, or on the hosts that the config names."""
    names = config.launcher.hosts
    on_this = here(num_ranks, config.launcher.port)
    if not names:
        return on_this
    _require_here(names[0])
    if len(names) == 1:
        return on_this
    address, interface = _meeting(config, names[1])
    sizes = spread(num_ranks, len(names))
    ranks = [
        RankPlace(local, size, node=name)
        for name, size in zip(names, sizes, strict=False)
        for local in range(size)
    ]
    return dataclasses.replace(on_this, ranks=ranks, address=address, interface=interface)


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
