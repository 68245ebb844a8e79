"""Names what a rank does in a step: one event for every message, pass, sum and barrier.

The proof walks these events, and ``hires.parallel.executor`` executes them. Kinds that concern one
rank alone:

    begin      forgets the gradients of the last step
    read       takes a microbatch from the loader
    forward    computes a pass; what follows up to its ``end`` happens inside it
    backward   the same, back through autograd
    end        ends the pass
    statistics takes over the running statistics of all copies of a stage
    optimise   updates the parameters

Kinds that concern others too:

    recv, send              posts one side of a message
    wait_recv, wait_send    waits for one of them
    wait_sends              waits for all sends that are still open
    collective              a gather or sum over a group; the rank goes on when it is complete
    issue, wait_issued      begins a sum over a group; waits for it
    publish                 one member of a group sends parameters that it has updated to the others
    reduce_scatter          each member of a group gets the sums of the gradients of what it updates
    all_gather              each member of a group gets what the others have updated
    create                  makes a group
    barrier                 all ranks of the world meet
    agree                   the same with an answer: whether all gradients are finite
    grad_norm               the same with another: the sum of the squares of all gradients

Only the program and the executor tell kinds apart. The proof and the simulation ask for the role of
an event and what it computes, and what counts messages for its operation and its traffic.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from hires.core.codecs import codec_named
from hires.plan.graph import Rect
from hires.plan.plan import Box
from hires.plan.routes import Route

POSTS = ("send", "recv")
OF_WORLD = ("agree", "grad_norm")
ALONE, MEETING = "alone", "meeting"
"""Roles. An event ``alone`` needs no other rank. At a ``meeting`` the members of a group wait until
the last of them has come."""
_ROLES = dict.fromkeys(
    ("begin", "read", "forward", "backward", "end", "statistics", "optimise"), ALONE
) | dict.fromkeys(
    ("collective", "create", "barrier", *OF_WORLD, "publish", "reduce_scatter", "all_gather"),
    MEETING,
)
PASS, UPDATE = "pass", "update"
_COMPUTES = {"forward": PASS, "backward": PASS, "optimise": UPDATE}
WORLD = -1
BARRIER = "barrier"
"""Traffic of the agreement to begin a step, which lies before the time of that step."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16}
BYTES |= {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


class Part(NamedTuple):
    """The work that an event belongs to; the events of one exchange share theirs."""

    action: str = ""
    """As ``F0``; empty at the ends of the step."""
    node: str = ""
    """The node at which the pass comes to the event; empty: outside the nodes of a pass."""
    value: str = ""
    back: bool = False
    """Whether it belongs to the node's way back."""
    number: int = -1
    """Position in ``Plan.edges`` (outside nodes), ``Stage.comm`` (at nodes) or
    ``sums_of`` (gradients) or ``publications`` (parameters)."""


NOWHERE = Part()


class Event(NamedTuple):
    """One thing that a rank does."""

    kind: str
    peer: int
    """The other rank; of a collective the index of its group; -1: none, or all ranks."""
    tag: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    what: str = ""
    """In words, for findings; equal on both sides of a message and on all members of a group."""
    lane: int = 0
    """Class of the message: between stages or halo, in which direction. Messages of one class from
    one rank to another are received in the order of sending."""
    call: int = 0
    """Sends and receives next to each other with the same number, not 0, are one group call; only a
    stream-ordered backend sees a difference."""
    part: Part = NOWHERE
    box: Box | None = None
    """The part of the value that a message holds."""
    channel: int = 0
    """Number of the communicator that carries a message where each has a stream of its own
    (:mod:`hires.plan.message_routes`); 0: one of its two ranks, lane and way alone."""
    route: Route | None = None
    """How it travels; None: nowhere, as of a group of one rank."""
    operation: str = ""
    """What the rank calls; of a wait nothing, as it belongs to the call that began the message."""
    traffic: str = ""
    """What travels: ``stage``, ``join``, the kind of a ``CommOp``, ``gradient``, ``parameter``,
    ``agree``, ``grad_norm`` or ``barrier``."""
    codec: str = ""
    """What makes its numbers smaller on the way (:mod:`hires.core.codecs`)."""

    @property
    def role(self) -> str:
        """``ALONE``, ``MEETING``, or its kind: a post, a wait or ``issue``."""
        return _ROLES.get(self.kind, self.kind)

    @property
    def computes(self) -> str:
        """``PASS``, up to the next event ``alone``, or ``UPDATE``; nothing: it takes no time."""
        return _COMPUTES.get(self.kind, "")

    @property
    def counts(self) -> bool:
        """Whether numbers of the step travel to other ranks."""
        return self.route is not None and self.traffic not in ("", BARRIER)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message, or that the rank contributes to a collective, as they travel."""
        return sent_bytes(math.prod(self.shape), self.dtype, self.codec)

    @property
    def words(self) -> str:
        """What a finding calls it."""
        return self.what or f"message {self.tag}"

    @property
    def backend(self) -> str:
        """The backend of its route; nothing: that of the plan."""
        return "" if self.route is None else self.route.backend

    @property
    def value(self) -> str:
        """The value that travels."""
        return self.part.value

    @property
    def rect(self) -> Rect | None:
        """Pixels of the whole map; None for all of them."""
        return None if self.box is None else self.box.rect

    @property
    def agreed(self) -> tuple[Hashable, ...]:
        """What both sides of a message must have alike."""
        return self.tag, self.shape, self.dtype, self.what, self.route


def sent_bytes(elements: int, dtype: str, codec: str) -> int:
    """Returns the bytes in which so many numbers travel."""
    return codec_named(codec).num_bytes(elements) if codec else elements * BYTES[dtype]
