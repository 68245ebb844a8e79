"""Joins and leaves the world, makes and frees groups, and returns their ranks and sizes.

Ranks are always ranks of the world, never positions in a group.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hires.comm.agreements import compare_starts, gather_texts, patient_group
from hires.comm.backends import rendezvous
from hires.comm.backends.backend import BACKENDS
from hires.comm.guarded_waits import guard, waiting
from hires.comm.sequence_check import CHECKS, join_check
from hires.comm.staging import Allocate, plain_empty
from hires.comm.transport import NOT_JOINED, Group, activity, transport
from hires.comm.world_search import world_here
from hires.core.errors import CommError, ConfigError
from hires.core.ranks.world import World
from hires.plan.tuning_table import TuningTable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def init(
    backends: Sequence[str] = ("gloo",),
    *,
    world: World | None = None,
    timeout_s: float = 120.0,
    table: TuningTable | None = None,
    host_empty: Allocate = plain_empty,
    check: str = "late",
    plan: str = "",
) -> None:
    """Joins the world with one or several backends; the first carries what names no other.

    Args:
        backends: names of ``BACKENDS``.
        world: this rank among all; by default as the environment says: torchrun's variables, or
            those of an MPI's launcher.
        timeout_s: longest wait for another rank, now and later.
        table: chooses the route of every operation that names none.
        host_empty: allocates what tensors of a device go through where it is not reached.
        check: of ``CHECKS``: when the ranks compare what they call (:mod:`.sequence_check`).
        plan: digest of the plan that the ranks carry out.

    Raises:
        CommError: not all ranks came in time, or they name other backends, another table or plan.
        ConfigError: a backend or ``check`` is unknown, or the table names one that is not in
            ``backends``; or the environment names no rank.
    """
    if transport.backends:
        raise CommError("this rank has joined a world already; call shutdown() first")
    if check not in CHECKS:
        raise ConfigError(f"unknown check {check!r}; choose one of {', '.join(CHECKS)}")
    missing = [name for name in (table.backends if table else ()) if name not in backends]
    if missing:
        raise ConfigError(
            f"the tuning table names {' and '.join(missing)}, and this world begins with "
            f"{', '.join(backends)}; add what is missing, or take a table without it"
        )
    world = world or world_here(backends)
    transport.timeout_s, transport.table, transport.host_empty = timeout_s, table, host_empty
    transport.stagings = {}
    try:
        for name in backends:
            backend = BACKENDS[name]()
            join = functools.partial(backend.join, world, timeout_s)
            waiting(join, f"the rendezvous at {world.address}:{world.port}")
            transport.backends[name] = backend
        transport.rank, ranks = world.rank, [*range(world.size)]
        place = transport.rank if transport.rank in ranks else -1
        transport.world = Group(ranks, place, dict.fromkeys(transport.backends))
        transport.nodes = tuple(rank // world.local_size * world.local_size for rank in ranks)
        meets = world.size > 1 and not transport.backend.is_alone
        if meets:
            store = rendezvous.store(world, timeout_s, "texts")
            transport.texts = rendezvous.texts(store, world.size, world.rank)
        own_plan, digest = [f"plan {plan}"] if plan else [], table.digest if table else "none"
        compare_starts(f"backends {', '.join(backends)}", f"table {digest}", *own_plan)
        if table is not None and world.local_size < world.size:
            # Machines may have different numbers of ranks.
            firsts = gather_texts(str(world.rank - world.local_rank))
            transport.nodes = tuple(map(int, firsts))
        if check != "off" and meets:
            transport.check = join_check(world, timeout_s, activity, check)
    except BaseException:
        _leave(failed=True)
        raise


def is_initialized() -> bool:
    """Whether this rank has joined a world."""
    return bool(transport.backends)


def get_rank(group: Group | None = None) -> int:
    """Returns this rank, or its position in a group; -1: it is not a member."""
    return (group or transport.world).index


def get_world_size(group: Group | None = None) -> int:
    """Returns the number of all ranks, or of those of a group; -1: this one is not a member."""
    among = group or transport.world
    return among.size if among.index >= 0 else -1


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Returns the ranks of a group, or all."""
    return [*(group or transport.world).ranks]


def get_backends() -> list[str]:
    """Returns the names of the backends in use, the default first."""
    return [*transport.backends]


def shutdown() -> None:
    """Leaves the world; CommError: ranks that ended well did not call the same operations."""
    _leave()


def new_group(
    ranks: Sequence[int] | DeviceMesh | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Group:
    """Makes a group on every backend; its members call it, those of two groups in one order.

    Other ranks may call it, too, and wait for none.

    ``ranks``: of the world, by default all; or a device mesh or a slice of one, whose ranks are
    those of this rank's part. ``timeout``: longest wait in it, in seconds. The order of ranks in a
    group is ascending, whatever that of ``ranks``.
    """
    if ranks is not None and hasattr(ranks, "mesh"):
        return new_group(sorted(ranks.mesh.flatten().tolist()), timeout)
    if ranks is None and not transport.backends:
        raise CommError(NOT_JOINED)
    members = sorted(ranks) if ranks is not None else [*transport.world.ranks]
    world = transport.world
    # A rehearsal, and a plan whose ranks are one process, have a world of one.
    stranger = world.size > 1 and not {*members} <= {*world.ranks}
    if stranger or len({*members}) < len(members) or not members:
        raise CommError(
            f"ranks {members} are no group of a world of {world.size}; name some of ranks 0 to "
            f"{world.size - 1}, each once"
        )
    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    handles = dict.fromkeys(transport.backends)
    if len(members) > 1:
        for name, backend in transport.backends.items():
            create = functools.partial(backend.new_group, members, timeout)
            handles[name] = waiting(create, f"group {members} over {name}")
    transport.num_groups[tuple(members)] += 1
    place = members.index(transport.rank) if transport.rank in members else -1
    return Group(members, place, handles, number=transport.num_groups[tuple(members)])


def destroy_group(group: Group) -> None:
    """Frees what a group has on every backend; its members call it when nothing is under way in it.

    A group of a world that this rank has left is freed already. CommError: it is the world.
    """
    if group is transport.world:
        raise CommError("the group of all ranks ends with shutdown()")
    group.calls.clear()
    handles, group.handles = group.handles, {}
    for name, backend in transport.backends.items():
        if handles.get(name) is not None:
            end = functools.partial(backend.destroy_group, handles[name])
            guard(end, f"the end of the group of ranks {group.ranks}", name)


def make_groups(members: list[list[int]]) -> dict[int, Group]:
    """Creates groups, all ranks in the same order; returns this rank's by index in ``members``."""
    groups = {number: new_group(ranks) for number, ranks in enumerate(members)}
    return {number: group for number, group in groups.items() if group.index >= 0}


def _leave(failed: bool = False) -> None:
    # One that ``failed`` to join waits for no other rank: some may be elsewhere.
    patient_group.cache_clear()
    check, transport.check, activity.calls = transport.check, None, None
    transport.channels = transport.streams = transport.table = transport.texts = None
    transport.num_groups.clear()
    left, transport.backends = transport.backends, {}
    transport.world, transport.rank = Group([0], 0, {}), 0
    transport.nodes = (0,)
    try:
        # Before MPI ends, whose last call lets no other thread of this process run: rank 0 could
        # not answer the others.
        if check is not None:
            # At the end of Python the error that ended the program is its last one.
            check.has_failed |= sys.exc_info()[0] is not None or hasattr(sys, "last_value")
            check.close()
    finally:
        for backend in reversed(left.values()):
            if failed:
                backend.abort()
            elif backend.is_initialized():
                backend.destroy_process_group()
        rendezvous.leave()
