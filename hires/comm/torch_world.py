"""Joins the world of a script that called ``init_process_group("hires")``, and makes its groups."""

from __future__ import annotations

import atexit
import collections
import functools
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires import comm
from hires.comm.backends import stores
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.comm_world import default_world
from hires.comm.process_group import HiresProcessGroup
from hires.core.errors import ConfigError
from hires.core.ranks import meeting
from hires.core.ranks.world import World
from hires.plan.tuning_table import TuningTable

_numbers: collections.Counter[str] = collections.Counter()  # meetings so far


def create(
    options: Any,
    backends: Sequence[str] = (),
    table: str | None = None,
    route: str | None = None,
) -> HiresProcessGroup:
    """Returns a process group for torch; that of all ranks joins the world.

    Args:
        options: those of torch: the store at which the members meet, their ranks, the timeout.
        backends: of the world, the default first; none: those of the table, or gloo.
        table: path of a tuning table.
        route: the backend of all operations of this group.

    Raises:
        ConfigError: the options or variables name an unknown backend, or no table.
        CommError: a rank did not come in time.
    """
    ranks, timeout_s = [*options.global_ranks_in_group], options.timeout.total_seconds()
    if ranks != sorted(ranks):
        raise ConfigError(f"ranks {ranks} of a group must ascend; leave sort_ranks out")
    if ranks:
        group = comm.new_group(ranks, timeout_s)
        return HiresProcessGroup(group, route, functools.partial(comm.destroy_group, group))
    if comm.is_initialized():  # the world of a caller of hires.comm
        return HiresProcessGroup(default_world().all_ranks, route)
    chosen = TuningTable.read(Path(table)) if table else None
    names = backends or (chosen.backends if chosen else ("gloo",))
    place = meeting_at(options.store, options.group_rank, options.group_size)
    comm.init(names, world=place, timeout_s=timeout_s, table=chosen)
    atexit.register(_leave)
    return HiresProcessGroup(default_world().all_ranks, route, _leave)


def _leave() -> None:
    # A script may end without destroy_process_group(), and an MPI must be finalised.
    atexit.unregister(_leave)
    comm.shutdown()


def meeting_at(store: Any, rank: int, size: int, words: str = "") -> WorldMeeting:
    """Returns where ranks meet that share a store; all of them call it.

    Where the launcher says that all its ranks are on this machine, the store is left alone: another
    user may write into it. ``words`` tell these ranks from others of the launcher.
    """
    # The address of the environment, if it has one: a library may choose its network by it.
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port_number = int(port) if port.isdecimal() and int(port) else 1
    secret, total = meeting.secret_of_environment(), os.environ.get("WORLD_SIZE", "")
    if total and total == os.environ.get("LOCAL_WORLD_SIZE") and address and port:
        world = World(rank, size, rank, size, address, port_number, 0, secret)
    else:
        # Launchers name local ranks differently, so the ranks of a machine are counted here. No
        # text names a file: by other ones a stranger can only keep these ranks from meeting here.
        place, proven = f"{socket.gethostname()} {_boot()}", stores.signed(store, secret)
        _numbers[words] += 1
        keys = [f"hires/place {_numbers[words]}/{other}" for other in range(size)]
        proven.set(keys[rank], f"{secrets.token_hex(16)} {place}")
        texts = [proven.get(key).decode() for key in keys]
        here = [other for other, text in enumerate(texts) if text.partition(" ")[2] == place]
        numbers = rank, size, here.index(rank), len(here)
        world, words = World(*numbers, address, port_number, 0, secret), f"{words} {texts}"
    return WorldMeeting(world, store, words)


@functools.cache
def _boot() -> str:
    # Containers of one machine often have one name each, and machines of one image the same name.
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
