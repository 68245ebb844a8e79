"""Messages and waits of backends with streams, as NCCL: group calls, and a bound of every wait.

A message has no tag there. What a rank posts on one communicator runs in the order of posting, and
a message holds up those behind it until its other side runs. So the communicators are those of
``hires.plan.message_routes``, and the posts of one call that share one are a single group call:
exactly what the proof assumes (``hires.plan.step_order``).

    events      recv a   send b   send c  | end of the call
    channel 1   a -------- b ------------>| one group call: a and b progress together
    channel 2                      c ---->| another one

A wait for NCCL puts an operation into the order of the stream and returns. If the other side never
comes, this process would wait for ever at its next synchronisation, without a name for the cause.
So an event is recorded after every such wait, and the process queries these events before it
synchronises:

    host      wait a | event   wait b | event   ...   oldest: a has ended, b has not: CommError b
    stream    ---- a ---- e -------- b (its sender hangs)

An event keeps no tensor, unlike the handle of an operation, which keeps what it fills.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.comm.backends.backend import Post
from hires.comm.backends.works import pauses, wait
from hires.core.errors import CommError, PeerError
from hires.plan.message_routes import Channel

_POLL_S = 1e-4


class StreamWait(NamedTuple):
    """An operation that a stream waits for, and the event after it."""

    event: Any
    what: str
    ranks: tuple[int, ...]
    """Those that it needs; this one may be among them."""
    operation: str = ""
    """As ``all_reduce``; empty: no operation of a step."""


class StreamWaits:
    """The operations that streams of a device wait for, in order; ``timeout_s``: for the next."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._module: Any = torch.get_device_module(device)
        self.timeout_s = timeout_s
        self._open: deque[StreamWait] = deque()
        self._free: list[Any] = []

    def add(self, what: str, ranks: tuple[int, ...], operation: str = "") -> None:
        """Notes an operation that this thread's stream now waits for; CommError: the device failed.

        Errors of the device from an earlier operation are raised by :meth:`finish_oldest`.
        """
        with contextlib.suppress(RuntimeError):
            self._drop_ended()  # so that a step needs few events
        event = self._free.pop() if self._free else self._module.Event()
        try:
            event.record()
        except RuntimeError as error:
            raise CommError(f"{what} failed on the device: {error}") from error
        self._open.append(StreamWait(event, what, ranks, operation))

    def oldest(self) -> StreamWait | None:
        """Returns the first operation that may not have ended; None: all have."""
        return self._open[0] if self._open else None

    def finish_oldest(self) -> None:
        """Returns when the first operation has ended.

        CommError: it has not within the limit. RuntimeError: the device or NCCL reports an error.
        """
        try:
            if not wait(self._open[0].event.query, self.timeout_s, pauses(_POLL_S)):
                raise PeerError(f"it has not ended on the device for {self.timeout_s:g} s")
        except (CommError, RuntimeError):
            self._open.clear()  # all others come after it
            raise
        self._drop_first()

    def _drop_ended(self) -> None:
        while self._open and self._open[0].event.query():
            self._drop_first()

    def _drop_first(self) -> None:
        self._free.append(self._open.popleft().event)


class GroupCall:
    """The posts of one call on one channel; it is the ``Work`` of each."""

    def __init__(self, home: Channels, channel: str) -> None:
        self._home, self.channel = home, channel
        self.posts: list[Post] = []
        self.works: list[Any] = []
        self.peers: set[int] = set()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits for the messages; on a GPU its stream does, within the limit of its waits.

        CommError: they are not complete after ``timeout``, and stay under way.
        """
        self._home.wait(self, timeout)
        return True

    def is_completed(self) -> bool:
        """Whether it has begun, and all its messages have ended."""
        return not self.posts and all(work.is_completed() for work in self.works)


class Channels:
    """This rank's communicators for messages.

    ``backend`` has ``new_channel(ranks)``, which all ranks of the world call in one order;
    ``device`` is where its tensors are. Operations that its streams wait for are noted in
    ``waits``, and ``finish`` returns when they have ended.
    """

    def __init__(
        self,
        backend: Any,
        channels: Sequence[Channel],
        device: torch.device,
        waits: StreamWaits | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._device, self._waits, self._finish = backend, device, waits, finish
        self._channels = channels
        self._open: dict[int, GroupCall] = {}  # by channel: posts of the call that is not over
        self._groups = [backend.new_channel(list(channel.ranks)) for channel in channels]
        rank = backend.rank
        for number, channel in enumerate(channels, start=1):
            if rank in channel.ranks:
                self._connect(number, channel, rank)

    def post(self, kind: str, tensor: Tensor, peer: int, channel: int) -> GroupCall:
        """Adds a ``send`` or ``recv`` to the call that ends with :meth:`end_call`."""
        unit = self._open.setdefault(channel, GroupCall(self, self._channels[channel - 1].what))
        group = self._groups[channel - 1]
        tensor = tensor.view(-1).view(torch.uint8)  # NCCL lacks some types, and only copies here
        unit.peers.add(peer)
        unit.posts.append(Post(kind == "send", tensor, peer, group))
        return unit

    def end_call(self) -> None:
        """Begins the posts of a call, those of each channel as one group call."""
        for unit in self._open.values():
            unit.works = self._backend.begin_together(unit.posts)
            unit.posts = []
        self._open.clear()

    def wait(self, unit: GroupCall, timeout: datetime.timedelta | None = None) -> None:
        """Waits for the messages of a unit; on a GPU its stream does, and not this process."""
        if self._open:
            self.end_call()
        for work in dict.fromkeys(unit.works):  # a group call is one work of all its messages
            work.wait(*() if timeout is None else (timeout,))
        works, unit.works = unit.works, []
        if works and self._waits is not None:
            peers = sorted(unit.peers)
            among = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
            what = f"a group call with {among} on the channel of {unit.channel}"
            self._waits.add(what, tuple(peers))

    def _connect(self, number: int, channel: Channel, rank: int) -> None:
        # The first message between two ranks makes their connection, for which a rank waits inside
        # the post: posted ahead in a step it would wait for a rank that needs its sends first. All
        # ranks come to the channels in one order, so here none waits in a circle.
        sent, received = (torch.ones(1, device=self._device) for _ in range(2))
        total = sum(1 for pair in channel.pairs if pair[1] == rank)
        buffers = []
        for source, target in channel.pairs:
            if source == rank:
                unit = self.post("send", sent, target, number)
            if target == rank:  # also, where a rank sends to itself
                buffers.append(torch.zeros_like(received))
                unit = self.post("recv", buffers[-1], source, number)
        self.wait(unit)
        self._finish()
        if sum(float(buffer) for buffer in buffers) != total:
            raise CommError(f"a first message on the channel of {channel.what} came out wrong")
