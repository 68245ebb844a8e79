"""Looks up how an operation is carried out: backend, algorithm, staging, log.

What decides is the same for all tensors of one type and size in a group, so it is looked up once:

    operation, group, type, bytes  ->  route  ->  method of a backend, or an algorithm on it
                                       |
                                       named by the caller, chosen by the tuning table, or usual
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import wrong_argument
from hires.comm.backends.backend import Backend, Members, Messages, Work
from hires.comm.backends.works import JoinedWork
from hires.comm.chain import RankChain
from hires.comm.comm_world import LEFT, NOT_JOINED, Group, group_or_all
from hires.comm.plain_reductions import REDUCED
from hires.comm.staging import Staging
from hires.core.errors import CommError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.ranks.call_records import CallChannel, CallFacts
from hires.plan.routes import (
    CARRIES,
    CHANNEL,
    DIRECT,
    MESSAGE,
    OWN,
    PLAN_ONLY,
    SEGMENTED,
    Route,
    dtype_class,
    is_possible,
    parse_route,
)
from hires.plan.traffic import CALLED
from hires.plan.tuning_table import Case

Choice = str | Route | None
"""A backend, or a whole route, also as text; None: the tuning table chooses."""
DIRECT_BYTES = 2**16
"""Up to this size a gather goes point to point: a third of the latency of gloo's collective."""
_METHODS = {
    **dict(enumerate(CALLED)),
    logs.SEND: "isend",
    logs.RECV: "irecv",
    **dict.fromkeys((logs.ALL_TO_ALL, logs.GATHER, logs.SCATTER), "exchange"),
}
"""Operation -> the method of a backend that carries it out."""
_REDUCES = (logs.ALL_REDUCE, logs.REDUCE, logs.REDUCE_SCATTER)


@dataclass(eq=False, slots=True)
class Dispatch:
    """An operation on a group as it is carried out: the same for all tensors of one size."""

    method: Callable[..., Any]  # of the backend, or the algorithm on it
    handle: Any  # of the group, at the backend
    staging: Staging
    reaches_cpu: bool
    operation: int  # in the log
    way: int  # in the log: backend, algorithm and segment
    what: str  # in words
    label: str  # of the wait in the time line
    backend: str
    peer: int = -1
    ranks: tuple[int, ...] = ()  # all members, of a collective
    group: Group = field(default_factory=lambda: group_or_all(None))
    facts: CallFacts | None = None  # what all its ranks must agree on; None: it has no others
    channel: CallChannel | None = None  # of a collective, where calls are kept
    channels: dict[int, CallChannel] = field(default_factory=dict)  # of messages, by tag
    complete: Callable[..., object] | None = None  # method of a message that its caller waits for


def call_of(
    operation: int,
    group: Group | None,
    choice: Choice,
    tensor: Tensor,
    num_bytes: int,
    peer: int = -1,
) -> Dispatch:
    """Returns how an operation is carried out; CommError: this rank is not in the group."""
    among = group_or_all(group)
    device = tensor.is_cpu or tensor.device.type
    key = (operation, choice, tensor.dtype, num_bytes, device, peer)
    try:
        call: Dispatch | None = among.calls.get(key)
    except (AttributeError, TypeError):
        raise wrong_argument(among, choice, peer) from None
    return call if call is not None else _new_call(among, tensor, key)


def channel_message(kind: str, peer: int, group: Group) -> Dispatch:
    """Returns the call that stands for a plan's ``send`` or ``recv``; its channel begins it."""
    call: Dispatch | None = group.calls.get((kind, peer))
    if call is None:
        operation, backend = logs.SEND if kind == "send" else logs.RECV, group.world.default
        staging, way = group.world.staging(backend), logs.way(backend, CHANNEL)
        what, label = _words_of(operation, group, peer)
        call = Dispatch(len, None, staging, True, operation, way, what, label, backend, peer)
        call.group = group
        group.keep((kind, peer), call)
    return call


def _new_call(group: Group, tensor: Tensor, key: tuple[Any, ...]) -> Dispatch:
    operation, choice, dtype, num_bytes, _, peer = key
    world = group.world
    method, is_message = _METHODS[operation], operation in (logs.SEND, logs.RECV)
    _require_usable(group, is_message, peer)
    if choice is not None and not isinstance(choice, str | Route):
        raise wrong_argument(group, choice, peer)
    device = tensor.device.type
    if operation in _REDUCES and dtype not in REDUCED:
        raise CommError(f"{dtype} has no sums; convert the tensor, as by tensor.to(torch.int64)")
    if device == "meta" and not isinstance(tensor, FakeTensor):  # a rehearsal's are
        raise CommError("a tensor on meta has no memory; give one on cpu or on a GPU")
    if group.size == 1 and not is_message:
        route, handle = Route(world.default), None
        members = Members(group.ranks, 0, world.timeout_s)
        function = getattr(Messages(Backend(), members), method)
    else:
        route = route_of(operation, group, choice, dtype, num_bytes, device, peer)
        function = _function_of(route, group, operation, method)
        handle = group.handles[route.backend]
    staging = world.staging(route.backend)
    algorithm = MESSAGE if peer >= 0 and route.algorithm == OWN else route.algorithm
    is_staged = device not in staging.reaches
    what, label = _words_of(operation, group, peer)
    made = Dispatch(
        function,
        handle,
        staging,
        "cpu" in staging.reaches,
        operation,
        logs.way(route.backend, algorithm, route.segment_bytes, is_staged),
        what,
        label,
        route.backend,
        peer,
        () if peer >= 0 else tuple(group.ranks),
        group,
    )
    backend = world.backends.get(route.backend)
    if peer >= 0:
        made.complete = getattr(backend, method.removeprefix("i"), None)
    if world.check is not None and group.size > 1:
        kind = str(dtype).removeprefix("torch.")
        made.facts = CallFacts(CALLED[operation], num_bytes, kind, str(route))
        if peer < 0:
            channel = f"{group.name} over {route.backend}"
            made.channel = world.check.ring.channel(channel, group.ranks)
    group.keep(key, made)
    return made


def _require_usable(group: Group, is_message: bool, peer: Any) -> None:
    if group.index < 0:
        raise CommError(f"this rank is not among ranks {group.ranks}, and uses their group")
    # A rank that forgot to begin would go on alone. Groups of one that the engine makes without a
    # world are alone by intent.
    if not group.world.is_joined and (group is group.world.all_ranks or group.size > 1):
        raise CommError(LEFT if group.world.was_left else NOT_JOINED)
    if is_message:
        _require_peer(group, peer)
    if not group.handles and (group.size > 1 or is_message):
        raise CommError(f"the group of ranks {group.ranks} was destroyed; make another one")


def _function_of(route: Route, group: Group, operation: int, method: str) -> Any:
    # The method of the backend, or an algorithm on it.
    backend, name = group.world.backends[route.backend], CALLED[operation]
    able = [algorithm for algorithm in (SEGMENTED, DIRECT) if name in CARRIES[algorithm]]
    if route.algorithm not in (OWN, MESSAGE, *able):
        raise CommError(
            f"{route.algorithm} cannot carry out {name}; choose one of {', '.join([OWN, *able])}"
        )
    if route.algorithm == DIRECT:
        members = Members(group.ranks, group.index, group.world.timeout_s)
        return getattr(Messages(backend, members), method)
    has_chain = operation == logs.BROADCAST and not BACKEND_FACTS[route.backend].has_streams
    if route.segment_bytes and has_chain:
        return RankChain(backend, route.segment_bytes)
    # In a rehearsal segments would do no more.
    if backend.is_alone or not route.segment_bytes:
        return getattr(backend, method)
    return in_segments(backend, method, route.segment_bytes)


def _words_of(operation: int, group: Group, peer: int) -> tuple[str, str]:
    # An operation in errors, and in the time line.
    label = CALLED[operation].replace("_", "-")
    if peer >= 0:
        what = f"a send to rank {peer}" if label == "send" else f"a receive from rank {peer}"
        return what, what
    ranks = "all ranks" if group is group.world.all_ranks else f"ranks {group.ranks}"
    return f"{'an' if label[0] == 'a' else 'a'} {label} among {ranks}", label


def _require_peer(group: Group, peer: Any) -> None:
    # A rehearsal, and a plan whose ranks are one process, have a world of one.
    if not hasattr(peer, "__index__"):
        raise wrong_argument(group, None, peer)
    if group.world.all_ranks.size > 1:
        if peer not in group.ranks:
            raise CommError(f"rank {peer} is not among ranks {group.ranks}; name one of these")
        if peer == group.world.rank:
            raise CommError(f"rank {peer} is this rank; copy the tensor instead")


def route_of(
    operation: int,
    group: Group,
    choice: Choice,
    dtype: torch.dtype,
    num_bytes: int,
    device: str,
    peer: int = -1,
) -> Route:
    """Returns the route of an operation; CommError: it names a backend that is not in use.

    A pure function of what all ranks of the group share, or both ends of a message.
    """
    name, world = CALLED[operation], group.world
    if isinstance(choice, Route):
        route = choice
    elif choice is not None:
        route = parse_route(choice) if ":" in choice else Route(choice)
    elif world.table is not None and group.size > 1:
        kind = dtype_class(name, str(dtype))
        ranks = group.ranks if peer < 0 else [world.rank, peer]
        same_node = len({world.nodes[rank] for rank in ranks}) == 1
        table = "send" if name == "recv" else name
        route = world.table.route(Case(table, len(ranks), same_node, device, kind, num_bytes))
        if route.algorithm in PLAN_ONLY:
            route = Route(route.backend)
    else:
        small = operation == logs.ALL_GATHER and num_bytes <= DIRECT_BYTES
        direct = small and not BACKEND_FACTS[world.default].backend.gathers_quickly
        route = Route(world.default, DIRECT if direct else OWN)
    if route.backend not in world.backends:
        in_use = ", ".join(world.backends)
        raise CommError(
            f"backend {route.backend!r} was not passed to init(); pass it, or use {in_use}"
        )
    if not is_possible(route):
        raise CommError(
            f"route {route}: its messages are posted one by one, and on streams each would wait "
            f"for the one before; use {route.backend}"
        )
    return route


_IN_PLACE = ("all_reduce", "reduce", "broadcast")


def in_segments(backend: Backend, operation: str, segment_bytes: int) -> Callable[..., Work | None]:
    """Returns what takes the arguments of a backend's method, and calls it for each segment."""

    def in_place(handle: Any, tensor: Tensor, *args: Any) -> list[Work]:
        flat, method = tensor.view(-1), getattr(backend, operation)
        ends = segments(flat.numel(), flat.element_size(), segment_bytes)
        return [method(flat[a:b], *args, handle, async_op=True) for a, b in ends]

    def gather(handle: Any, outputs: Sequence[Tensor], tensor: Tensor) -> list[Work]:
        rows, own = [output.view(-1) for output in outputs], tensor.view(-1)
        # Every rank has all sizes, and so the same segments; the last ones may be empty.
        longest = max(row.numel() for row in rows)
        ends = segments(longest, own.element_size(), segment_bytes)
        return [
            backend.all_gather([row[a:b] for row in rows], own[a:b], handle, async_op=True)
            for a, b in ends
        ]

    begin: Callable[..., list[Work]] = in_place if operation in _IN_PLACE else gather

    def carry_out(*args: Any, group: Any = None, async_op: bool = False) -> Work | None:
        work = JoinedWork(begin(group, *args))
        if async_op:
            return work
        work.wait()
        return None

    return carry_out


def segments(num_elements: int, element_bytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Returns where each segment of a tensor begins and ends; at least one, of any size.

    >>> segments(10, 4, 16)
    [(0, 4), (4, 8), (8, 10)]
    """
    length = max(1, segment_bytes // element_bytes)
    begins = range(0, max(1, num_elements), length)
    return [(begin, min(num_elements, begin + length)) for begin in begins]
