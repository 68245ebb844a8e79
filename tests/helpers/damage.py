"""Valid programs of messages, and the ways in which one rank's can be damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.prove import creation, prove_each
from hires.plan.routes import Route
from tests.helpers.threaded import Programs

POSTS = ("send", "recv")


@dataclass
class Damage:
    """What was done to which programs, and who must be named if it does harm."""

    kind: str
    rank: int
    peers: set[int]
    """Any of them may be the other side of what goes wrong."""


def valid_programs(plan: Plan, backend: str = "") -> tuple[Programs, list[list[int]]]:
    """Returns what all ranks do from the creation of groups to the end of a step, and groups.

    With a backend all of it goes through that one, else each event has its own route.
    """
    members = groups(plan)
    ranks = range(plan.world)
    return [[*creation(members, r), *through(events(plan, r), backend)] for r in ranks], members


def through(program: Iterable[Event], backend: str) -> list[Event]:
    """Returns a program whose messages and collectives take one backend."""
    return [
        event._replace(route=Route(backend)) if event.route is not None and backend else event
        for event in program
    ]


def prove(plan: Plan, backend: str = "") -> list[str]:
    """Proves one step of the first replica, each rank for itself, through one backend."""
    ranks = range(plan.ranks_per_replica)
    members = [[rank for rank in group if rank in ranks] for group in groups(plan)]
    programs = [[*creation(members, rank), *through(events(plan, rank), backend)] for rank in ranks]
    return prove_each(programs, members)


def damage(rng: random.Random, programs: Programs, members: list[list[int]]) -> Damage | None:
    """Damages programs in place in a random way; None if there is nothing to damage."""
    ways = list(WAYS)
    rng.shuffle(ways)
    for way in ways:
        done = WAYS[way](rng, programs, members)
        if done is not None:
            return Damage(way, done[0], done[1])
    return None


Way = Callable[[random.Random, Programs, list[list[int]]], "tuple[int, set[int]] | None"]


def _places(programs: Programs, *kinds: str) -> list[tuple[int, int]]:
    """Returns (rank, index) of the events of these kinds."""
    return [(r, i) for r, one in enumerate(programs) for i, e in enumerate(one) if e.kind in kinds]


def _drop(rng: random.Random, programs: Programs, members: list[list[int]]):
    places = _places(programs, *POSTS, "wait_recv")
    if not places:
        return None
    rank, index = rng.choice(places)
    return rank, {programs[rank].pop(index).peer}


def _swapped(*kinds: str) -> Way:
    """Returns the way in which two events of a rank change places, but not those of group calls."""

    def way(rng: random.Random, programs: Programs, members: list[list[int]]):
        every = [[i for i, e in enumerate(one) if e.kind in kinds] for one in programs]
        ranks = [rank for rank, places in enumerate(every) if len(places) > 1]
        if not ranks:
            return None
        rank = rng.choice(ranks)
        program, (one, other) = programs[rank], rng.sample(every[rank], 2)
        first, second = program[one], program[other]
        program[one] = second._replace(call=first.call)
        program[other] = first._replace(call=second.call)
        if kinds == POSTS:
            return rank, {first.peer, second.peer}
        return rank, {*members[first.peer], *members[second.peer]} - {rank}

    return way


def _changed(change: Callable[[random.Random, Event, int], Event]) -> Way:
    """Returns the way that changes one message."""

    def way(rng: random.Random, programs: Programs, members: list[list[int]]):
        places = _places(programs, *POSTS)
        if not places:
            return None
        rank, index = rng.choice(places)
        before = programs[rank][index]
        programs[rank][index] = change(rng, before, len(programs))
        return rank, {before.peer}

    return way


def _at_once(rng: random.Random, programs: Programs, members: list[list[int]]):
    rank = rng.randrange(len(programs))
    peers = {event.peer for event in programs[rank] if event.kind in POSTS}
    if not peers:
        return None
    programs[rank] = at_once(programs[rank])
    return rank, peers


def at_once(program: list[Event]) -> list[Event]:
    """Posts each receive only where it is waited for, and waits for a send at once."""
    posted: dict[tuple[int, int], list[Event]] = {}
    made = []
    for event in program:
        if event.kind == "recv":
            posted.setdefault((event.peer, event.tag), []).append(event._replace(call=0))
            continue
        if event.kind == "wait_recv":
            made.append(posted[event.peer, event.tag].pop(0))
        made.append(event._replace(call=0))
        if event.kind == "send":
            made.append(event._replace(kind="wait_send", call=0))
    return made


WAYS: dict[str, Way] = {
    "drop": _drop,
    "swap": _swapped(*POSTS),
    "reorder": _swapped("collective"),
    "regroup": _swapped("create"),
    "at once": _at_once,
    "peer": _changed(lambda rng, e, n: e._replace(peer=(e.peer + rng.randint(1, n)) % (n + 1))),
    "tag": _changed(lambda rng, e, n: e._replace(tag=e.tag + rng.choice([1, 2, 1000]))),
    "shape": _changed(lambda rng, e, n: e._replace(shape=(*e.shape, 1))),
    "dtype": _changed(lambda rng, e, n: e._replace(dtype="int8")),
}
"""Name -> what changes the programs and returns (rank, its peers), or None."""
