"""Holds small programs of communication calls, one list per rank, as data: no plan stands behind.

The explorer runs them over all interleavings, the abstract machine in one pass, and tests on real
ranks. A call is one line of text:

    barrier                          on the first backend, by all ranks, and blocking
    all_reduce mpi 4KiB op=max       backend, size and reduction
    broadcast 0 4KiB group=pair      the root, or the other rank, is the first number
    a = isend 1 tag=3                a handle makes the call non-blocking
    recv any                         from any rank
    wait a                           ``wait`` alone waits for all open handles
    [a = isend 1, b = irecv 1]       a list is one ``batch_isend_irecv``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.units import parse_size
from hires.plan.event import BYTES, Event
from hires.plan.routes import BACKENDS, MESSAGE, STREAMED, Route, exact_size

ANY = -2
"""In place of a peer: a receive takes the message of any rank."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier",
)  # fmt: skip
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
CALL_NAMES = (*COLLECTIVES, *SENDS, *RECEIVES, "wait")
"""What a call of a program may be."""
MOST_CALLS = 10_000


class CommCall(NamedTuple):
    """One call of one rank."""

    operation: str
    backend: str = "gloo"
    group: tuple[int, ...] = ()
    """Ranks of a collective, in ascending order; empty: all."""
    peer: int = -1
    """Root, or the other rank of a message, as a rank of the world; -1: none."""
    tag: int = 0
    num_bytes: int = 4
    dtype: str = "float32"
    reduction: str = ""
    parts: tuple[int, ...] = ()
    """Elements for each member in uneven forms: of ``all_to_all`` member i has ``parts[(i + j) %
    n]`` for member j."""
    handle: str = ""
    """Name of the handle of a non-blocking call, or of the one to wait for; empty: blocking, or
    all open handles."""
    batch: int = 0
    """Calls next to each other with the same number, not 0, are one ``batch_isend_irecv``."""

    @property
    def text(self) -> str:
        """The call in words, without its peer: alike on all members of a collective."""
        if self.operation in ("wait", "barrier"):
            return f"wait {self.handle}".strip() if self.operation == "wait" else "barrier"
        words = f"{self.operation} of {_bytes(self.num_bytes)} {self.dtype}"
        words += f" ({self.reduction})" if self.reduction else ""
        words += f" in parts {list(self.parts)}" if self.parts else ""
        if self.operation in ROOTED:
            words += f", root {self.peer}"
        elif self.operation in SENDS:
            words += f" to rank {self.peer}"
        elif self.operation in RECEIVES:
            words += " from any rank" if self.peer == ANY else f" from rank {self.peer}"
        return words

    @property
    def is_blocking(self) -> bool:
        """Whether the rank waits for the end of the call inside it."""
        return not self.handle or self.operation == "wait"


@dataclass
class CommProgram:
    """The calls of every rank."""

    ranks: list[list[CommCall]]

    def members(self, call: CommCall) -> tuple[int, ...]:
        """Returns the ranks of a collective."""
        return call.group or tuple(range(len(self.ranks)))

    def events(self) -> tuple[list[list[Event]], list[list[int]]]:
        """Returns the programs and groups as the abstract machine takes them.

        A communicator of each backend is a group of its own. Each message has a tag of its own:
        messages of one tag between two ranks keep their order, so the first meets the first.
        """
        groups: dict[tuple[str, tuple[int, ...]], int] = {}
        tags: dict[tuple[Any, ...], int] = {}
        programs = [self._events_of(rank, groups, tags) for rank in range(len(self.ranks))]
        return programs, [list(ranks) for _, ranks in groups]

    def _events_of(
        self, rank: int, groups: dict[tuple[str, tuple[int, ...]], int], tags: dict[Any, int]
    ) -> list[Event]:
        events: list[Event] = []
        ends: dict[str, Event] = {}  # of open handles, what waits for them
        counts: Counter[Any] = Counter()
        for call in self.ranks[rank]:
            if call.operation == "wait":
                names = [call.handle] if call.handle else [*ends]
                events += [ends.pop(name) for name in names]
                continue
            what = call.text
            if call.operation in COLLECTIVES:
                key = call.backend, self.members(call)
                group = groups.setdefault(key, len(groups))
                counts[group] += 1
                # Alike whether a member blocks or not. What all must agree on stands in the words.
                route = Route(call.backend)
                post = Event("issue", group, counts[group], what=what, route=route)
                end = Event("wait_issued", group, counts[group], what=what, route=route)
            else:
                sends = call.operation in SENDS
                ends_of = (rank, call.peer) if sends else (call.peer, rank)
                channel = (*ends_of, call.backend, call.tag)
                counts[channel, sends] += 1
                tag = tags.setdefault((channel, counts[channel, sends]), len(tags))
                what = f"message {call.tag} of {_bytes(call.num_bytes)} over {call.backend}"
                kind = "send" if sends else "recv"
                route, size = Route(call.backend, MESSAGE), call.num_bytes // BYTES[call.dtype]
                post = Event(
                    kind, call.peer, tag, (size,), call.dtype, what, call=call.batch, route=route
                )
                end = Event(f"wait_{kind}", call.peer, tag, what=what, route=route)
            events.append(post)
            if call.is_blocking:
                events.append(end)
            else:
                ends[call.handle] = end
        return events


def _bytes(num_bytes: int) -> str:
    return f"{text} B" if (text := exact_size(num_bytes)).isdecimal() else text


def read_program(values: Mapping[str, Any]) -> CommProgram:
    """Returns the program of a file's values; ConfigError names the line that is wrong.

    ``ranks`` has a list of lines by rank, ``all`` lines that come first on every rank, and
    ``groups`` ranks by name; ``backend`` is that of calls that name none.
    """
    known = ("ranks", "all", "groups", "backend")
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; {offer(str(key), known)}")
    lines = values.get("ranks")
    if not isinstance(lines, Mapping) or not lines:
        raise ConfigError("`ranks` must have the lines of each rank, as {0: [barrier], 1: []}")
    if sorted(map(str, lines)) != sorted(map(str, range(len(lines)))):
        raise ConfigError(f"`ranks` names {list(lines)}; number them from 0, each once")
    by_rank = {int(rank): own for rank, own in lines.items()}
    backend = str(values.get("backend", "gloo"))
    reader = _Reader(len(by_rank), _groups(values, len(by_rank)), _backend(backend))
    common = values.get("all") or []
    return CommProgram(
        [reader.calls(rank, common, by_rank[rank] or []) for rank in range(len(by_rank))]
    )


def _groups(values: Mapping[str, Any], world: int) -> dict[str, tuple[int, ...]]:
    groups = values.get("groups") or {}
    if not isinstance(groups, Mapping):
        raise ConfigError("`groups` must have ranks by name, as {pair: [0, 1]}")
    for name, ranks in groups.items():
        valid = isinstance(ranks, list) and ranks and set(ranks) <= set(range(world))
        if not valid or len(set(ranks)) < len(ranks):
            raise ConfigError(f"group {name}={ranks} must list some of ranks 0 to {world - 1}")
    return {str(name): tuple(sorted(ranks)) for name, ranks in groups.items()}


def _backend(name: str) -> str:
    if name not in BACKENDS:
        raise ConfigError(f"{name!r} is no number, size or backend; {offer(name, BACKENDS)}")
    return name


class _Reader:
    """Turns lines into calls."""

    def __init__(self, world: int, groups: dict[str, tuple[int, ...]], backend: str) -> None:
        self.world, self.groups, self.backend = world, groups, backend

    def calls(self, rank: int, *parts: Any) -> list[CommCall]:
        """Returns the calls of one rank."""
        calls: list[CommCall] = []
        open_handles: set[str] = set()
        for part in parts:
            if not isinstance(part, Sequence) or isinstance(part, str):
                raise ConfigError(f"rank {rank}: {part!r} must be a list of calls")
            for item in part:
                batch = len(calls) + 1 if isinstance(item, list) else 0
                for line in item if isinstance(item, list) else [item]:
                    try:
                        call = self._call(rank, str(line))._replace(batch=batch)
                        _check_handles(call, open_handles)
                    except ConfigError as error:
                        raise ConfigError(f"rank {rank}, {line!r}: {error}") from error
                    calls.append(call)
        if open_handles:
            names = ", ".join(sorted(open_handles))
            raise ConfigError(f"rank {rank} never waits for {names}; end with `wait`")
        if len(calls) > MOST_CALLS:
            raise ConfigError(f"rank {rank} has {len(calls)} calls; use at most {MOST_CALLS}")
        return calls

    def _call(self, rank: int, line: str) -> CommCall:
        handle, _, text = line.rpartition(" = ")
        operation, *words = text.split() or [""]
        if operation not in CALL_NAMES:
            raise ConfigError(f"unknown operation {operation!r}; {offer(operation, CALL_NAMES)}")
        call = CommCall(operation, self.backend, handle=handle.strip())
        if operation == "wait":
            return call._replace(handle=words[0] if words else "")
        for word in words:
            call = self._with(call, word)
        return self._checked(rank, call)

    def _with(self, call: CommCall, word: str) -> CommCall:
        # One word of a line: a number, a size, a backend, or key=value.
        key, is_pair, value = word.partition("=")
        if not is_pair and word == "any":
            return call._replace(peer=ANY)
        if not is_pair and word.isdecimal():
            return call._replace(peer=int(word))
        if key == "op":
            return call._replace(reduction=value)
        if key == "tag" and value.isdecimal():
            return call._replace(tag=int(value))
        if key == "dtype" and value in BYTES:
            return call._replace(dtype=value)
        if key == "group" and value in self.groups:
            return call._replace(group=self.groups[value])
        if is_pair:
            keys = "op", "tag", "dtype", "group"
            choices = {"dtype": tuple(BYTES), "group": tuple(self.groups)}.get(key, keys)
            raise ConfigError(f"{word!r} is not valid; {offer(value, choices)}")
        num_bytes = 0 if word.upper() == "0B" else parse_size(word)
        if num_bytes is None:
            return call._replace(backend=_backend(word))
        return call._replace(num_bytes=num_bytes)

    def _checked(self, rank: int, call: CommCall) -> CommCall:
        is_message = call.operation in (*SENDS, *RECEIVES)
        if is_message or call.operation in ROOTED:
            side = "the other rank" if is_message else "the root"
            peers = [*range(self.world)] if not call.group else [*call.group]
            peers = [r for r in peers if r != rank] if is_message else peers
            takes_any = call.operation in RECEIVES and call.backend not in STREAMED
            if call.peer not in peers and not (call.peer == ANY and takes_any):
                raise ConfigError(f"{side} is {call.peer}; name one of {peers}")
        if call.operation in ("isend", "irecv") and not call.handle:
            raise ConfigError(f"it needs a handle: `a = {call.operation} ...`, and later `wait a`")
        if call.operation in ("send", "recv") and call.handle:
            raise ConfigError(f"it blocks and has no handle; use i{call.operation}")
        if call.group and rank not in call.group:
            raise ConfigError(f"rank {rank} is no member of group {list(call.group)}")
        if call.operation in REDUCING and not call.reduction:
            return call._replace(reduction="sum")
        return call


def _check_handles(call: CommCall, open_handles: set[str]) -> None:
    if call.operation == "wait":
        if call.handle and call.handle not in open_handles:
            offered = offer(call.handle, open_handles)
            raise ConfigError(f"{call.handle!r} is no open handle; {offered}")
        open_handles.difference_update([call.handle] if call.handle else [*open_handles])
    elif call.handle in open_handles:
        raise ConfigError(f"{call.handle!r} is still open; wait for it, or use another name")
    elif call.handle:
        open_handles.add(call.handle)
