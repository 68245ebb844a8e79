"""Defines a world as one of its ranks has it: backends, groups, log and checks.

A process may be a rank of several worlds. Operations take the world of their group; those without
a group, the default world, which ``hires.comm.init`` joins.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hires.comm.backends.backend import Backend
from hires.comm.backends.group_calls import StreamWaits
from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.message_log import MessageLog
from hires.comm.sequence_check import SequenceCheck
from hires.comm.staging import Allocate, Staging, plain_empty
from hires.core.errors import CommError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.ranks.heartbeat import Activity
from hires.core.ranks.timeline import Recorder
from hires.plan.tuning_table import TuningTable

MOST_CALLS = 4096
"""Dispatches that a group keeps: sizes and tags may vary without end."""
NOT_JOINED = "no world has been joined; call hires.comm.init first"
LEFT = "this rank has left the world of the group, as by shutdown(); join another, make new groups"


@dataclass(repr=False)
class Group:
    """Some ranks, in ascending order, that call collectives together."""

    ranks: list[int]
    index: int
    """Position of this rank among them; -1: it is not one, and may not use the group."""
    handles: dict[str, Any]
    """Backend -> its own handle; None: of all ranks, or of a group of one."""
    recorder: Recorder | None = None
    """Records how long the rank waited in the group."""
    calls: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Dispatches of operations on it, by what decides them."""
    number: int = 0
    """Among the groups of these ranks, in the order in which they made them; 0: the world."""
    world: CommWorld = field(default_factory=lambda: default_world(), compare=False)
    """Whose ranks these are."""

    def __post_init__(self) -> None:
        self.world.groups[id(self)] = self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """Its name: the same on all members, and unique on each of them."""
        if self.number == 0:
            return "all ranks"
        text = ", ".join(map(str, self.ranks))
        return f"ranks {text}" + (f" (group {self.number} of them)" if self.number > 1 else "")

    def __repr__(self) -> str:
        """Returns its ranks, this rank's place among them, and its backends."""
        place = f"position {self.index}" if self.index >= 0 else "not a member"
        return f"Group(ranks {self.ranks}, {place}, {', '.join(self.handles) or 'no backend'})"

    def keep(self, key: Any, call: Any) -> None:
        """Keeps the dispatch of an operation; drops all others once there are too many."""
        if len(self.calls) >= MOST_CALLS:
            self.calls.clear()
        self.calls[key] = call


@dataclass(eq=False, repr=False)
class CommWorld:
    """The ranks that have joined together, as one of them."""

    backends: dict[str, Backend] = field(default_factory=dict)
    """Those in use by name, the default first."""
    rank: int = 0
    timeout_s: float = 0.0
    """Longest wait for another rank."""
    table: TuningTable | None = None
    """Chooses the route of what names none."""
    host_empty: Allocate = plain_empty
    meeting: WorldMeeting | None = None
    """Where its ranks met."""
    nodes: tuple[int, ...] = (0,)
    """The machine of each rank: the lowest rank on it."""
    stagings: dict[str, Staging] = field(default_factory=dict)
    """Backend -> the host's buffers for tensors that it does not reach."""
    log: MessageLog | None = None
    """Keeps what messages cost, while steps run."""
    streams: StreamWaits | None = None  # what streams of the device wait for, where they do
    texts: Callable[..., list[str]] | None = None  # exchanges texts of all ranks, where it can
    check: SequenceCheck | None = None  # keeps calls, and compares them where ranks wait
    patient: Group | None = None  # all ranks with a long timeout, once one was needed
    num_groups: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Groups that were made of the same ranks, in one order on all of them."""
    shared_groups: dict[tuple[Any, ...], Group] = field(default_factory=dict)
    """Groups that plans share, by their ranks."""
    groups: weakref.WeakValueDictionary[int, Group] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """All that are in use, whose dispatches end with the world."""
    was_left: bool = False

    def __post_init__(self) -> None:
        self.all_ranks = Group([self.rank], 0, dict.fromkeys(self.backends), world=self)

    @property
    def is_joined(self) -> bool:
        """Whether this rank is part of it: it has joined, and has not left."""
        return bool(self.backends)

    @property
    def default(self) -> str:
        """Name of the backend that carries messages without a route."""
        return next(iter(self.backends), "gloo")

    @property
    def backend(self) -> Backend:
        """The default backend; CommError: no world was joined."""
        if not self.backends:
            raise CommError(NOT_JOINED)
        return self.backends[self.default]

    @property
    def has_streams(self) -> bool:
        """Whether messages of a backend pass streams in the order of posting, without tags."""
        carriers = [name for name, one in self.backends.items() if not one.is_alone]
        return any(BACKEND_FACTS[name].has_streams for name in carriers)

    def staging(self, name: str) -> Staging:
        """Returns the host's buffers beside a backend."""
        if name not in self.stagings:
            self.stagings[name] = Staging(BACKEND_FACTS[name].backend.devices, self.host_empty)
        return self.stagings[name]


class _Unlogged(threading.local):
    """While a thread is inside, the log keeps none of its collectives: they are parts of one."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


unlogged = _Unlogged()
activity = Activity()  # the communication that this process waits in, for the heartbeat
_default = [CommWorld()]


def default_world() -> CommWorld:
    """Returns the world of calls that name no group."""
    return _default[0]


def set_default(world: CommWorld) -> CommWorld:
    """Makes a world the default; returns the one before."""
    before, _default[0] = _default[0], world
    return before


def group_or_all(group: Group | None) -> Group:
    """Returns a group, or all ranks of the default world."""
    return _default[0].all_ranks if group is None else group


@contextlib.contextmanager
def logged(log: MessageLog | None, world: CommWorld | None = None) -> Iterator[None]:
    """Keeps the messages of the block in a log; None: in none."""
    world = world or default_world()
    before, world.log = world.log, log
    try:
        yield
    finally:
        world.log = before
