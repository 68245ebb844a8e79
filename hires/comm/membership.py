"""Joins and leaves worlds, makes and frees groups, and returns their ranks and sizes.

Ranks are always ranks of the world, never positions in a group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hires.comm.agreements import compare_starts, gather_texts
from hires.comm.argument_checks import members_of, require_backends, seconds_of
from hires.comm.backends import rendezvous
from hires.comm.backends.backend import Members
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.comm_world import (
    LEFT,
    NOT_JOINED,
    CommWorld,
    Group,
    activity,
    default_world,
    group_or_all,
    set_default,
)
from hires.comm.handles import guard, waiting
from hires.comm.sequence_check import CHECKS, join_check
from hires.comm.staging import Allocate, plain_empty
from hires.comm.world_search import world_here
from hires.core.errors import CommError, ConfigError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.ranks.world import World
from hires.plan.tuning_table import TuningTable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_joined: list[CommWorld] = []  # by this process, the last one at the end


def init(
    backends: Sequence[str] = ("gloo",),
    *,
    world: World | WorldMeeting | None = None,
    timeout_s: float = 120.0,
    table: TuningTable | None = None,
    host_empty: Allocate = plain_empty,
    check: str = "late",
    plan: str = "",
) -> None:
    """Joins the default world with one or several backends; the first carries what names no other.

    Args:
        backends: names of ``hires.core.codecs.BACKEND_FACTS``.
        world: this rank among all, or where they meet; by default as the environment says:
            torchrun's variables, or those of an MPI's launcher.
        timeout_s: longest wait for another rank, now and later.
        table: chooses the route of every operation that names none.
        host_empty: allocates what tensors of a device go through where it is not reached.
        check: of ``CHECKS``: when the ranks compare what they call (:mod:`.sequence_check`).
        plan: digest of the plan that the ranks carry out.

    Raises:
        CommError: not all ranks came in time, or they name other backends, another table or plan;
            or an argument is of another kind.
        ConfigError: a backend or ``check`` is unknown, or the table names one that is not in
            ``backends``; or the environment names no rank.
    """
    if is_initialized():
        raise CommError("this rank has joined a world already; call shutdown() first")
    before = set_default(CommWorld(table=table, host_empty=host_empty))
    try:
        _join(default_world(), backends, world, timeout_s, check, plan)
    except BaseException:
        set_default(before)
        raise


def join_world(
    backends: Sequence[str], world: World | WorldMeeting, timeout_s: float = 120.0
) -> CommWorld:
    """Joins one more world, whose groups name it; errors are those of :func:`init`."""
    joined = CommWorld()
    _join(joined, backends, world, timeout_s)
    return joined


def _join(
    joined: CommWorld,
    backends: Sequence[str],
    place: World | WorldMeeting | None,
    timeout_s: float,
    check: str = "late",
    plan: str = "",
) -> None:
    table = joined.table
    require_backends(backends)
    seconds_of(timeout_s)
    if check not in CHECKS:
        raise ConfigError(f"unknown check {check!r}; choose one of {', '.join(CHECKS)}")
    missing = [name for name in (table.backends if table else ()) if name not in backends]
    if missing:
        raise ConfigError(
            f"the tuning table names {' and '.join(missing)}, and this world begins with "
            f"{', '.join(backends)}; add what is missing, or take a table without it"
        )
    classes = {name: BACKEND_FACTS[name].backend for name in backends}
    meeting = (
        place
        if isinstance(place, WorldMeeting)
        else WorldMeeting(place or world_here(backends, limit_s=timeout_s))
    )
    world, ranks = meeting.world, [*range(meeting.world.size)]
    joined.meeting, joined.timeout_s, joined.rank = meeting, timeout_s, world.rank
    _joined.append(joined)
    try:
        joined.all_ranks = Group(ranks, world.rank, dict.fromkeys(backends), world=joined)
        joined.nodes = tuple(rank // world.local_size * world.local_size for rank in ranks)
        what = f"the rendezvous at {world.address}:{world.port}"
        meets = world.size > 1 and not classes[backends[0]].is_alone
        if meets:
            meet = functools.partial(meeting.part, "texts", timeout_s)
            store = waiting(meet, what, joined, ranks)
            joined.texts = rendezvous.texts(store, world.size, world.rank)
        # Compared first: a backend that another rank does not join would wait for it in vain.
        own_plan, digest = [f"plan {plan}"] if plan else [], table.digest if table else "none"
        compare_starts(joined, f"backends {', '.join(backends)}", f"table {digest}", *own_plan)
        for name, kind in classes.items():
            backend = kind()
            waiting(functools.partial(backend.join, meeting, timeout_s), what, joined, ranks)
            joined.backends[name] = backend
        if table is not None and world.local_size < world.size:
            # Machines may have different numbers of ranks.
            firsts = gather_texts(str(world.rank - world.local_rank), world=joined)
            joined.nodes = tuple(map(int, firsts))
        if check != "off" and meets:
            joined.check = join_check(meeting, timeout_s, activity, check)
    except BaseException:
        leave_world(joined, failed=True)
        raise


def is_initialized() -> bool:
    """Whether this rank has joined the default world."""
    return default_world().is_joined


def get_rank(group: Group | None = None) -> int:
    """Returns this rank, or its position in a group; -1: it is not a member.

    Before :func:`init` and after :func:`shutdown` this process is rank 0 of a world of one.
    """
    return group_or_all(group).index


def get_world_size(group: Group | None = None) -> int:
    """Returns the number of all ranks, or of those of a group; -1: this one is not a member.

    Before :func:`init` and after :func:`shutdown` it is 1.
    """
    among = group_or_all(group)
    return among.size if among.index >= 0 else -1


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Returns the ranks of a group, or all."""
    return [*group_or_all(group).ranks]


def get_backends() -> list[str]:
    """Returns the names of the backends in use, the default first."""
    return [*default_world().backends]


def shutdown() -> None:
    """Leaves all worlds; CommError: ranks that ended well did not call the same operations."""
    set_default(CommWorld())
    with contextlib.ExitStack() as ends:  # each world ends, whatever the others raise
        for world in _joined:
            ends.callback(leave_world, world)


def new_group(
    ranks: Sequence[int] | DeviceMesh | None = None,
    timeout: float | datetime.timedelta | None = None,
    world: CommWorld | None = None,
) -> Group:
    """Makes a group on every backend; its members call it, those of two groups in one order.

    Other ranks may call it, too, and wait for none.

    ``ranks``: of the ``world``, by default all; or a device mesh or a slice of one, whose ranks are
    those of this rank's part. ``timeout``: longest wait in it, in seconds. The order of ranks in a
    group is ascending, whatever that of ``ranks``.
    """
    if ranks is not None and hasattr(ranks, "mesh"):
        return new_group(sorted(ranks.mesh.flatten().tolist()), timeout, world)
    world = default_world() if world is None else world
    if not isinstance(world, CommWorld):
        raise CommError(f"world {world!r:.60} is none; give what join_world returned, or leave it")
    if world.was_left or (ranks is None and not world.is_joined):
        raise CommError(LEFT if world.was_left else NOT_JOINED)
    every = world.all_ranks
    members = members_of(every.ranks if ranks is None else ranks, every)
    if timeout is not None:
        timeout = datetime.timedelta(seconds=seconds_of(timeout))
    handles = dict.fromkeys(world.backends)
    if len(members) > 1:
        for name, backend in world.backends.items():
            create = functools.partial(backend.new_group, members, timeout)
            handles[name] = waiting(create, f"group {members} over {name}", world, members)
    world.num_groups[tuple(members)] += 1
    place = members.index(world.rank) if world.rank in members else -1
    number = world.num_groups[tuple(members)]
    return Group(members, place, handles, number=number, world=world)


def destroy_group(group: Group) -> None:
    """Frees what a group has on every backend; its members call it when nothing is under way in it.

    A group of a world that this rank has left is freed already. CommError: it is the world.
    """
    if group is group.world.all_ranks:
        raise CommError("the group of all ranks ends with shutdown()")
    group.calls.clear()
    handles, group.handles = group.handles, {}
    for name, backend in group.world.backends.items():
        if handles.get(name) is not None:
            handles[name].chains.close()
            end = functools.partial(backend.destroy_group, handles[name])
            guard(end, f"the end of the group of ranks {group.ranks}", group.world, name)


def make_groups(
    members: list[list[int]], world: CommWorld | None = None, shares: bool = False
) -> dict[int, Group]:
    """Creates groups, all ranks in the same order; returns this rank's by index in ``members``.

    ``shares``: takes those that an earlier call of this kind has made of the same ranks.
    """
    world = world or default_world()
    made = world.shared_groups if shares else {}
    seen, groups = Counter[tuple[int, ...]](), dict[int, Group]()
    for number, ranks in enumerate(members):
        key = (*ranks, f"number {seen[tuple(ranks)]}")  # one plan needs both of two such groups
        seen[tuple(ranks)] += 1
        if key not in made:
            made[key] = new_group(ranks, None, world)
        groups[number] = made[key]
    return {number: group for number, group in groups.items() if group.index >= 0}


def leave_world(world: CommWorld, failed: bool = False) -> None:
    """Leaves a world; its ranks call it together, and CommError is that of :func:`shutdown`.

    One that ``failed`` to join waits for no other rank: some may be elsewhere.
    """
    _joined.remove(world)
    check, left = world.check, world.backends
    world.check = world.streams = world.texts = world.patient = None
    world.backends, world.was_left = {}, True
    world.shared_groups.clear()
    for group in [*world.groups.values()]:
        group.calls.clear()  # what was looked up would go past the question whether they may
        for handle in filter(None, group.handles.values()):
            handle.chains.close()
        group.handles = {}  # a module or loop may keep the group longer than its connections
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
                if isinstance(backend.everyone, Members):
                    backend.everyone.chains.close()
                backend.destroy_process_group()
        if world.meeting is not None:
            world.meeting.leave()
