"""Looks up how an operation is carried out: backend, algorithm, staging, log.

What decides is the same for all tensors of one type and size in a group, so it is looked up once:

    operation, group, type, bytes  ->  route  ->  method of a backend, or an algorithm on it
                                       |
                                       named by the caller, chosen by the tuning table, or usual
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.comm import message_log as logs
from hires.comm.argument_checks import wrong_argument
from hires.comm.backends.backend import Alone, Members, Messages
from hires.comm.backends.null import NullBackend
from hires.comm.operation_routes import Choice, route_of
from hires.comm.plain_reductions import REDUCED
from hires.comm.segments import in_segments
from hires.comm.staging import Staging
from hires.comm.transport import NOT_JOINED, Group, transport
from hires.core.errors import CommError
from hires.core.ranks.call_records import CallChannel, CallFacts
from hires.plan.routes import DIRECT, MESSAGE, OWN, SEGMENTED, Route
from hires.plan.table_rules import CARRIES
from hires.plan.traffic import CALLED

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
    group: Group | None = None  # whose recorder notes a wait inside an action
    facts: CallFacts | None = None  # what all its ranks must agree on; None: it has no others
    channel: CallChannel | None = None  # of a collective, where calls are kept
    channels: dict[int, CallChannel] = field(default_factory=dict)  # of messages, by tag
    complete: Callable[..., object] | None = None  # method of a message that its caller waits for
    keeps_terms: bool = False  # whether a reduction to one rank leaves the others' tensors alone


def call_of(
    operation: int,
    group: Group | None,
    choice: Choice,
    tensor: Tensor,
    num_bytes: int,
    peer: int = -1,
) -> Dispatch:
    """Returns how an operation is carried out; CommError: this rank is not in the group."""
    among = transport.world if group is None else group
    device = tensor.is_cpu or tensor.device.type
    key = (operation, choice, tensor.dtype, num_bytes, device, peer)
    try:
        call: Dispatch | None = among.calls.get(key)
    except (AttributeError, TypeError):
        raise wrong_argument(among, choice, peer) from None
    return call if call is not None else _new_call(among, tensor, key)


def plan_message(
    kind: str, peer: int, group: Group | None, algorithm: str, backend: str, device: str
) -> Dispatch:
    """Returns how a plan's ``send`` or ``recv`` goes through memory or on a channel.

    It has no method: the group's memory, or the channels of the plan in use, begin the message.
    ``device``: where the tensor is; empty where a channel carries it.
    """
    among = group or transport.world
    key = kind, peer, algorithm, device
    call: Dispatch | None = among.calls.get(key)
    if call is None:
        operation, staging = logs.SEND if kind == "send" else logs.RECV, transport.staging(backend)
        what, label = _words_of(operation, among, peer)
        way = logs.way(backend, algorithm, 0, device not in ("", *staging.reaches))
        near = "cpu" in staging.reaches
        call = Dispatch(_no_method, None, staging, near, operation, way, what, label, backend, peer)
        call.group = group
        among.keep(key, call)
    return call


def _no_method(*_: Any) -> None:
    raise AssertionError("a plan's message is begun by the memory or the channels of its ranks")


def _new_call(group: Group, tensor: Tensor, key: tuple[Any, ...]) -> Dispatch:
    operation, choice, dtype, num_bytes, _, peer = key
    method, is_message = _METHODS[operation], operation in (logs.SEND, logs.RECV)
    _require_usable(group, is_message, peer)
    device = tensor.device.type
    if operation in _REDUCES and dtype not in REDUCED:
        raise CommError(f"{dtype} has no sums; convert the tensor, as by tensor.to(torch.int64)")
    if device == "meta" and not isinstance(tensor, FakeTensor):  # a rehearsal's are
        raise CommError("a tensor on meta has no memory; give one on cpu or on a GPU")
    if group.size == 1 and not is_message:
        route, handle = Route(transport.default), Members(group.ranks, 0, transport.timeout_s)
        function = getattr(Alone(), method)
    else:
        route = route_of(operation, group, choice, dtype, num_bytes, device, peer)
        function = _function_of(route, group, operation, method)
        handle = group.handles[route.backend]
    staging = transport.staging(route.backend, method, dtype)
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
    backend = transport.backends.get(route.backend)
    made.keeps_terms = route.algorithm == OWN and backend is not None and backend.keeps_terms
    if peer >= 0:
        made.complete = getattr(backend, method.removeprefix("i"), None)
    if transport.check is not None and group.size > 1:
        kind = str(dtype).removeprefix("torch.")
        made.facts = CallFacts(CALLED[operation], num_bytes, kind, str(route))
        if peer < 0:
            channel = f"{group.name} over {route.backend}"
            made.channel = transport.check.ring.channel(channel, group.ranks)
    group.keep(key, made)
    return made


def _require_usable(group: Group, is_message: bool, peer: Any) -> None:
    if group.index < 0:
        raise CommError(f"this rank is not among ranks {group.ranks}, and uses their group")
    # A rank that forgot to begin would go on alone. Groups of one that the engine makes without a
    # world are alone by intent.
    if not transport.backends and (group is transport.world or group.size > 1):
        raise CommError(NOT_JOINED)
    if is_message:
        _require_peer(group, peer)
    if not group.handles and (group.size > 1 or is_message):
        raise CommError(f"the group of ranks {group.ranks} was destroyed; make another one")


def _function_of(route: Route, group: Group, operation: int, method: str) -> Any:
    # The method of the backend, or an algorithm on it.
    backend, name = transport.backends[route.backend], CALLED[operation]
    able = [algorithm for algorithm in (SEGMENTED, DIRECT) if name in CARRIES[algorithm]]
    if route.algorithm not in (OWN, MESSAGE, *able):
        raise CommError(
            f"{route.algorithm} cannot carry out {name}; choose one of {', '.join([OWN, *able])}"
        )
    if route.algorithm == DIRECT:
        members = Members(group.ranks, group.index, transport.timeout_s)
        return getattr(Messages(backend, members), method)
    # In a rehearsal segments would do no more.
    if isinstance(backend, NullBackend) or not route.segment_bytes:
        return getattr(backend, method)
    return in_segments(backend, method, route.segment_bytes)


def _words_of(operation: int, group: Group, peer: int) -> tuple[str, str]:
    # An operation in errors, and in the time line.
    label = CALLED[operation].replace("_", "-")
    if peer >= 0:
        what = f"a send to rank {peer}" if label == "send" else f"a receive from rank {peer}"
        return what, what
    ranks = "all ranks" if group is transport.world else f"ranks {group.ranks}"
    return f"{'an' if label[0] == 'a' else 'a'} {label} among {ranks}", label


def _require_peer(group: Group, peer: Any) -> None:
    # A rehearsal, and a plan whose ranks are one process, have a world of one.
    if not hasattr(peer, "__index__"):
        raise wrong_argument(group, None, peer)
    if transport.world.size > 1:
        if peer not in group.ranks:
            raise CommError(f"rank {peer} is not among ranks {group.ranks}; name one of these")
        if peer == transport.rank:
            raise CommError(f"rank {peer} is this rank; copy the tensor instead")
