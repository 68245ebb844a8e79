"""Makes groups of ranks on every backend, and frees them.

Ranks are always ranks of the world, never positions in a group.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hires.comm.agreements import gather_texts
from hires.comm.guarded_waits import guard, waiting
from hires.comm.transport import NOT_JOINED, Group, has_streams, transport
from hires.core.errors import CommError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def new_group(
    ranks: Sequence[int] | DeviceMesh | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Group:
    """Makes a group on every backend; its members call it, those of two groups in one order.

    Other ranks may call it, too, and wait for none; over nccl all ranks of the world must.

    ``ranks``: of the world, by default all; or a device mesh or a slice of one, whose ranks are
    those of this rank's part. ``timeout``: longest wait in it, in seconds. The order of ranks in a
    group is ascending, whatever that of ``ranks``.
    """
    if ranks is not None and hasattr(ranks, "mesh"):
        own = sorted(ranks.mesh.flatten().tolist())
        groups: dict[str, Group] = {}
        # Over nccl every rank makes all of them.
        for text in sorted({*gather_texts(json.dumps(own))}) if has_streams() else ():
            groups[text] = new_group(json.loads(text), timeout)
        return groups[json.dumps(own)] if groups else new_group(own, timeout)
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
