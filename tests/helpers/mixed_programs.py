"""Random programs of communication calls as data, for real ranks.

A program is made as one list of operations of the whole world, and every rank takes its part of it
in this order. So it cannot deadlock: whatever a rank waits for stands before that in the list.

    world      all_reduce a    isend b 0->1    broadcast c    wait b
    rank 0     all_reduce a    isend b         broadcast c    wait b
    rank 1     all_reduce a    recv b          broadcast c
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from hires.plan.event import BYTES

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier",
)  # fmt: skip
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
LARGEST = 8 * 2**20
UNEVEN = (
    "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter",
)  # fmt: skip
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COMPLEX = ("complex64", "complex128")
_NUMBERS = ("sum", "product", "min", "max")
_BITS = ("band", "bor", "bxor")
REDUCTIONS = {
    **dict.fromkeys(FLOATS, (*_NUMBERS, "avg")),
    **dict.fromkeys(INTEGERS, (*_NUMBERS, *_BITS)),
    **dict.fromkeys(COMPLEX, ("sum",)),
    "bool": ("sum", "product", "min", "max", *_BITS),
}
"""dtype -> what sums of it may be."""
BUGS = (
    "opposite orders", "missing peer", "wrong root", "wrong size", "wrong type", "wrong reduction",
)  # fmt: skip


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
    """Name of the handle of a non-blocking call, or of the one to wait for; empty: blocking."""
    batch: int = 0
    """Calls next to each other with the same number, not 0, are one ``batch_isend_irecv``."""

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


@dataclass
class SeededBug:
    """A program with one mistake."""

    program: CommProgram
    rank: int
    """The rank whose program was changed."""
    calls: tuple[CommCall, ...]
    """The calls that an error must name one of."""


def random_program(
    rng: random.Random,
    world: int,
    backends: tuple[str, ...],
    num_steps: int,
    largest: int = LARGEST,
) -> CommProgram:
    """Returns a program of ``num_steps`` operations that ends under every semantics of messages."""
    maker = _Maker(rng, world, backends, largest)
    for _ in range(num_steps):
        maker.step()
    maker.wait_for_all()
    return CommProgram(maker.ranks)


class _Maker:
    def __init__(
        self, rng: random.Random, world: int, backends: tuple[str, ...], largest: int
    ) -> None:
        self.rng, self.world, self.backends, self.largest = rng, world, backends, largest
        self.ranks: list[list[CommCall]] = [[] for _ in range(world)]
        self.open: list[list[str]] = [[] for _ in range(world)]
        self.count = 0

    def step(self) -> None:
        """Adds one operation, and some waits."""
        kind = self.rng.random()
        if kind < 0.65:
            self._collective()
        elif kind < 0.9 or self.world < 3:
            source, target = self.rng.sample(range(self.world), 2)
            self._message(source, target)
        else:
            self._ring()
        for rank in range(self.world):
            if self.open[rank] and self.rng.random() < 0.3:
                self._wait(rank, self.rng.choice(self.open[rank]))

    def wait_for_all(self) -> None:
        """Ends every rank's program."""
        for rank in range(self.world):
            for name in self.rng.sample(self.open[rank], len(self.open[rank])):
                self._wait(rank, name)

    def _collective(self) -> None:
        operation = self.rng.choice(COLLECTIVES)
        ranks = [*range(self.world)]
        if self.world > 2 and self.rng.random() < 0.4:
            ranks = sorted(self.rng.sample(ranks, self.rng.randint(2, self.world - 1)))
        call = CommCall(operation, self.rng.choice(self.backends), tuple(ranks), num_bytes=0)
        if operation != "barrier":
            dtype = self.rng.choice(tuple(REDUCTIONS))
            call = self._sized(call._replace(dtype=dtype), len(ranks))
            if operation in REDUCING:
                call = call._replace(reduction=self.rng.choice(REDUCTIONS[dtype]))
            if operation in ROOTED:
                call = call._replace(peer=self.rng.choice(ranks))
        if len(ranks) == self.world:
            call = call._replace(group=())
        for rank in ranks:
            self._add(rank, call, self.rng.random() < 0.4)

    def _sized(self, call: CommCall, num_ranks: int) -> CommCall:
        width = BYTES[call.dtype]
        if call.operation in UNEVEN and self.rng.random() < 0.4:
            parts = tuple(self._count(width) // num_ranks for _ in range(num_ranks))
            return call._replace(parts=parts, num_bytes=sum(parts) * width)
        return call._replace(num_bytes=self._count(width) * width)

    def _count(self, width: int) -> int:
        """Returns a number of elements: mostly few, at times none, and up to the largest size."""
        most = self.largest // width
        kind = self.rng.random()
        if kind < 0.08:
            return 0
        if kind < 0.97:
            return min(most, int(2 ** self.rng.uniform(0, 14)))
        return self.rng.randint(most // 64, most)

    def _message(self, source: int, target: int, batch: int = 0) -> None:
        dtype = self.rng.choice(tuple(REDUCTIONS))
        size = self._count(BYTES[dtype]) * BYTES[dtype]
        call = CommCall(
            "", self.rng.choice(self.backends), (), -1, self.rng.randint(0, 3), size, dtype
        )
        for rank, peer, kind in ((source, target, "send"), (target, source, "recv")):
            later = bool(batch) or self.rng.random() < 0.5
            operation = f"i{kind}" if later else kind
            self._add(rank, call._replace(operation=operation, peer=peer, batch=batch), later)

    def _ring(self) -> None:
        # Every rank sends to the next one and receives from the one before in one batch.
        ranks = self.rng.sample(range(self.world), self.world)
        self.count += 1
        for index, rank in enumerate(ranks):
            self._message(rank, ranks[(index + 1) % self.world], batch=self.count)

    def _add(self, rank: int, call: CommCall, later: bool) -> None:
        if later:
            self.count += 1
            call = call._replace(handle=f"h{self.count}")
            self.open[rank].append(call.handle)
        self.ranks[rank].append(call)

    def _wait(self, rank: int, name: str) -> None:
        self.open[rank].remove(name)
        self.ranks[rank].append(CommCall("wait", handle=name))


def seed_bug(rng: random.Random, program: CommProgram, bug: str) -> SeededBug | None:
    """Returns a program with a mistake of a kind; None: this one has no place for it."""
    changes = {
        "opposite orders": _cross,
        "missing peer": _drop,
        "wrong root": _other_root,
        "wrong size": _other_size,
        "wrong type": _other_type,
        "wrong reduction": _other_reduction,
    }
    broken = CommProgram([[*calls] for calls in program.ranks])
    rank = rng.randrange(len(broken.ranks))
    changed = changes[bug](rng, broken, broken.ranks[rank], rank)
    return None if changed is None else SeededBug(broken, rank, changed)


def _cross(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    # Two blocking collectives of all ranks, of two backends, come in the other order on one rank.
    backends = sorted({c.backend for own in program.ranks for c in own if c.operation != "wait"})
    if len(backends) < 2:
        return None
    pair = tuple(CommCall("all_reduce", name, (), reduction="sum") for name in backends[-2:])
    for other, own in enumerate(program.ranks):
        own += pair[::-1] if other == rank else pair
    return pair


def _collectives(calls: list[CommCall], *operations: str) -> list[int]:
    return [i for i, call in enumerate(calls) if call.operation in (operations or COLLECTIVES)]


def _drop(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    # The last collective of a communicator is missing on one rank.
    last = {(calls[i].backend, calls[i].group): i for i in _collectives(calls)}
    if not last:
        return None
    index = rng.choice([*last.values()])
    call = calls[index]
    calls[:] = [
        one
        for i, one in enumerate(calls)
        if i != index and not (call.handle and one == CommCall("wait", handle=call.handle))
    ]
    return (call,)


def _other_root(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    places = _collectives(calls, *ROOTED)
    if not places:
        return None
    index = rng.choice(places)
    members = program.members(calls[index])
    roots = [root for root in members if root != calls[index].peer]
    calls[index] = calls[index]._replace(peer=rng.choice(roots))
    return (calls[index],)


def _other_size(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    places = _collectives(calls, "all_reduce", "broadcast", "reduce")
    if not places:
        return None
    index = rng.choice(places)
    width = BYTES[calls[index].dtype]
    calls[index] = calls[index]._replace(num_bytes=calls[index].num_bytes + width)
    return (calls[index],)


def _other_type(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    # Of the same width, so that no size is wrong.
    places = _collectives(calls, "all_reduce", "broadcast", "all_gather_into_tensor")
    choices = [(i, dtype) for i in places for dtype in _types_like(calls[i])]
    if not choices:
        return None
    index, dtype = rng.choice(choices)
    calls[index] = calls[index]._replace(dtype=dtype)
    return (calls[index],)


def _types_like(call: CommCall) -> list[str]:
    return [
        dtype
        for dtype, reductions in REDUCTIONS.items()
        if dtype != call.dtype and BYTES[dtype] == BYTES[call.dtype]
        if not call.reduction or call.reduction in reductions
    ]


def _other_reduction(
    rng: random.Random, program: CommProgram, calls: list[CommCall], rank: int
) -> tuple[CommCall, ...] | None:
    places = [i for i in _collectives(calls, *REDUCING) if len(REDUCTIONS[calls[i].dtype]) > 1]
    if not places:
        return None
    index = rng.choice(places)
    others = [one for one in REDUCTIONS[calls[index].dtype] if one != calls[index].reduction]
    calls[index] = calls[index]._replace(reduction=rng.choice(others))
    return (calls[index],)
