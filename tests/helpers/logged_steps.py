"""Logs what a rank really sends, receives and sums in one step, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hires import comm
from hires.core.config.run_config import from_dict
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.parallel import cursor, gradients
from hires.plan import updates
from hires.plan.event import ALONE, Event
from hires.plan.plan import Plan
from hires.plan.routes import Route
from tests.helpers.jobs import join


def logged_step(
    world: World,
    config: dict[str, Any],
    plan: dict[str, Any],
    alone_bytes: int,
    swapped: tuple[int, int, int] | None = None,
) -> list[tuple]:
    """Returns what a rank really does in one step and before it, in order.

    (``create``, ranks), (``send`` or ``recv``, peer, tag, shape, backend),
    (``wait_send`` or ``wait_recv``, peer, tag), (``collective``, ``issue`` or ``wait_issued``,
    ranks, numbers), and the kinds of what concerns no other rank, with its action.
    ``swapped``: a rank, and two positions among its events that change places.
    """
    updates.ALONE_BYTES = alone_bytes
    log: list[tuple] = []

    def creating(ranks: list[int] | None = None, *timeout: Any, **named: Any) -> Any:
        # All ranks call it for each group, as torch asks; only the members wait for each other.
        if ranks is not None and world.rank in ranks:
            log.append(("create", tuple(ranks)))
        return create(ranks, *timeout, **named)

    made = Plan.from_dict(plan)
    join(world, made)
    backend = comm.default_world().backend
    create, backend.new_group = backend.new_group, creating
    _log_messages(log)
    engine = build_rank(from_dict(config), made, world.rank, 1)
    walk = engine.executor.cursor
    if swapped is not None and swapped[0] == world.rank:
        events = list(walk.events)
        _, one, other = swapped
        events[one], events[other] = events[other], events[one]
        walk.events = events
    for kind, method in engine.executor.methods.items():
        if Event(kind, -1, 0).role == ALONE:
            engine.executor.methods[kind] = _logged_first(log, method)
    engine.executor.begin(lambda: not log.append(("barrier", "")))
    engine.executor.step(engine.loaders)
    engine.close()
    comm.barrier()
    comm.shutdown()
    return log


def _logged_first(log: list[tuple], method: Any) -> Any:
    """Returns a method of the executor that logs its event first."""
    return lambda event: (log.append((event.kind, event.part.action)), method(event))


def _log_messages(log: list[tuple]) -> None:
    """Logs every message of this process inside a step."""

    def posting(function: Any) -> Any:
        def call(
            kind: str, tensor: Tensor, peer: int, tag: int, *place: Any, backend: Route, **how: Any
        ) -> Any:
            log.append((kind, peer, tag, tuple(tensor.shape), backend.backend))
            wait = function(kind, tensor, peer, tag, *place, backend=backend, **how).wait
            return SimpleNamespace(wait=lambda: (log.append((f"wait_{kind}", peer, tag)), wait()))

        return call

    def meeting(function: Any) -> Any:
        def call(tensors: Any, group: Any, async_op: bool = False, **how: Any) -> Any:
            listed = tensors if isinstance(tensors, list) else [tensors]
            size = sum(tensor.numel() for tensor in listed)
            log.append(("issue" if async_op else "collective", tuple(group.ranks), size))
            if not async_op:
                return function(tensors, group=group, **how)
            wait = function(tensors, group=group, async_op=True, **how).wait
            done = ("wait_issued", tuple(group.ranks), size)
            return SimpleNamespace(wait=lambda **how: (log.append(done), wait(**how)))

        return call

    cursor.post = posting(comm.post)
    cursor.all_gather_stacked = meeting(comm.all_gather_stacked)
    cursor.all_reduce = meeting(comm.all_reduce)
    gradients.all_reduce = meeting(comm.all_reduce)
    gradients.all_reduce_coalesced = meeting(comm.all_reduce_coalesced)
