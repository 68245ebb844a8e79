"""Registers ``"hires"`` with torch.distributed; torch runs it when it is imported.

    torch.distributed.init_process_group("hires")

It is an entry point of the group ``torch.backends``, so scripts need no import of hires, and hires'
modules are loaded when a group is made. Variables of the environment, or ``pg_options``, choose
what carries the messages.

Source:
    https://github.com/pytorch/pytorch/issues/122468 (autoload of extensions)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BACKENDS, TABLE = "HIRES_COMM_BACKENDS", "HIRES_COMM_TABLE"
"""Variables: names of backends with commas between, and the path of a tuning table."""
NAME = "hires"
_DEVICES = ["cpu", "cuda"]


@dataclass(frozen=True)
class ProcessGroupOptions:
    """What ``pg_options=`` of ``init_process_group`` and ``new_group`` may be."""

    backends: tuple[str, ...] = ()
    """Of the world, the default first; empty: :data:`BACKENDS`, else gloo."""
    table: str | None = None
    """Path of a tuning table; None: :data:`TABLE`, else none."""
    route: str | None = None
    """Backend of all operations of this group; None: the table chooses, or the default."""


def register() -> None:
    """Makes ``hires`` a backend of torch.distributed; nothing happens where torch has none."""
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_DEVICES)
    if _names():  # torch does not tell a rendezvous which backend it is for
        from torch.distributed.rendezvous import _rendezvous_handlers as handlers

        handlers["env"] = functools.partial(_meet, handlers["env"])


def _create(options: Any, group_options: Any) -> Any:
    from hires.comm import torch_world

    choice = group_options or ProcessGroupOptions()
    return torch_world.create(
        options,
        choice.backends or _names(),
        choice.table or os.environ.get(TABLE),
        choice.route,
    )


def _meet(usual: Any, url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    # torch reads RANK and others, which torchrun sets; an MPI's launcher numbers its processes in
    # variables of its own.
    if os.environ.get("RANK") or "rank=" in url:
        yield from usual(url, **options)
        return
    from hires.comm.world_search import world_here
    from hires.core.errors import ConfigError

    try:
        limit = options.get("timeout")
        limits = {} if limit is None else {"limit_s": limit.total_seconds()}
        world = world_here(_names(), **limits)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    place = f"{world.address}:{world.port}?rank={world.rank}&world_size={world.size}"
    from torch.distributed.rendezvous import rendezvous

    yield from rendezvous(f"tcp://{place}", **options)


def _names() -> tuple[str, ...]:
    given = os.environ.get(BACKENDS, "").split(",")
    return tuple(name.strip() for name in given if name.strip())
