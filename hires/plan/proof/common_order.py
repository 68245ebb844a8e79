"""Proves plans whose ranks take their steps in one common order, without the abstract machine.

A step is what several ranks do together: a collective, or the posts of one exchange. Suppose there
is one order of all steps of which the program of each rank is a part:

    common order   post a   collective   post b   post c   collective
    rank 0         post a   collective  (waits a)  post c   collective      has nothing of b
    rank 1         post a   collective   post b   (waits b) collective      has nothing of c

Then no rank blocks another for ever. The first step in this order that some rank never comes to
would be behind a wait; but what that wait needs are posts of earlier steps, to which all ranks
came. It holds under every semantics in ``SEMANTICS`` if

* both sides of each message are in one step, and no rank waits between its posts of a step: a
  rendezvous has its partner, and messages of one lane between two ranks run on their stream in one
  order;
* each rank waits for exactly the receives that it posted;
* mailboxes: a rank reads in the order of posting and expects no more at once than there are slots,
  so each sender finds room, at the latest when the reader comes to the step;
* every rank of the world comes to every collective.

Tiles in the same place among their neighbours have the same program but for the numbers of their
peers, so one of each kind is read (``rank_kinds.translated_kinds``):

    a b b b c      nine kinds of program in a grid of any size
    d e e e f
    d e e e f      the e in the middle: to peer + 1 as this e to its own + 1
    g h h h i

Grids of tiles have such an order, also where some tiles hold nothing. For any other plan, and for a
wrong one, there is no proof here, and the machine decides and explains.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.ranks.mailbox_limits import SLOTS
from hires.plan.event import ALONE, MEETINGS, POSTS, Event
from hires.plan.proof.machine import MAILBOXES, RENDEZVOUS, SEPARATE
from hires.plan.proof.walk import WORLD, Proof

SEMANTICS = (RENDEZVOUS, MAILBOXES, SEPARATE)
"""Under these the common order is a proof. Pair streams have no lanes."""

Post = tuple[bool, int, int]
"""(whether it sends, tag, how many of the tag went to or came from the peer before)."""


class NoCommonOrderError(Exception):
    """There is none that is seen here, which does not mean that ranks block each other."""


@dataclass
class _Steps:
    """What the program of one rank shares with others."""

    order: list[Hashable] = field(default_factory=list)
    joint: dict[Hashable, Event] = field(default_factory=dict)
    """The collectives and sums."""
    posts: dict[int, dict[Post, tuple[Any, ...]]] = field(default_factory=dict)
    """By distance of the peer's number: what both sides must agree on."""


def prove_in_order(
    programs: Sequence[Iterator[Event]],
    members: Sequence[Sequence[int]],
    kinds: Sequence[int] | None = None,
) -> Proof | None:
    """Returns the proof of programs with a common order, or None: then the machine decides.

    Args:
        programs: what each rank does, in order.
        members: the ranks of each group.
        kinds: for each rank the one whose program stands for its own; the distances of the peers
            are the same. None: each rank stands for itself.
    """
    kinds = range(len(programs)) if kinds is None else kinds
    sizes = [len(set(ranks)) for ranks in members]
    if any(1 < size < len(programs) for size in sizes):
        return None
    world = {WORLD, *(group for group, size in enumerate(sizes) if size == len(programs))}
    try:
        steps = {rank: _steps_of(rank, programs[rank], world) for rank in sorted(set(kinds))}
    except NoCommonOrderError:
        return None
    first = steps[kinds[0]]
    if any(other.joint != first.joint for other in steps.values()):
        return None
    compared: set[tuple[int, int, int]] = set()
    for rank, kind in enumerate(kinds):
        for distance, posts in steps[kind].posts.items():
            peer = rank + distance
            if not 0 <= peer < len(kinds):
                return None
            pair = kind, distance, kinds[peer]
            mirrored = steps[kinds[peer]].posts.get(-distance)
            if pair not in compared and mirrored != {
                (not sends, tag, count): facts for (sends, tag, count), facts in posts.items()
            }:
                return None
            compared.add(pair)
    before: dict[Hashable, set[Hashable]] = {}
    for one in steps.values():
        for earlier, later in itertools.pairwise(one.order):
            before.setdefault(later, set()).add(earlier)
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return None
    num_sends = {
        kind: sum(sends for posts in one.posts.values() for sends, *_ in posts)
        for kind, one in steps.items()
    }
    num_joint = sum(event.kind in ("collective", "issue") for event in first.joint.values())
    return Proof(sum(num_sends[kind] for kind in kinds), num_joint)


def _steps_of(rank: int, program: Iterator[Event], world: set[int]) -> _Steps:
    """Returns the steps of a rank, whose waits are checked on the way."""
    steps = _Steps()
    counts: Counter[Hashable] = Counter()
    expected: dict[tuple[int, int], int] = Counter()  # receives not waited for, by (peer, tag)
    mail: dict[tuple[int, int], deque[int]] = {}  # tags of those in mailboxes, by (peer, lane)
    waits = False  # since the last step
    for event in program:
        kind, peer, tag = event[:3]
        step: Hashable = None
        waits = waits or kind.startswith("wait")
        if kind in POSTS:
            count = counts[kind, peer, tag]
            counts[kind, peer, tag] += 1
            step = tag, count
            # Tag, shape, dtype, words, lane, and whether it goes through memory.
            steps.posts.setdefault(peer - rank, {})[kind == "send", tag, count] = event[2:8]
            if kind == "recv":
                expected[peer, tag] += 1
                if event.mail:
                    box = mail.setdefault((peer, event.lane), deque())
                    box.append(tag)
                    if len(box) > SLOTS:
                        raise NoCommonOrderError
        elif kind == "wait_recv":
            expected[peer, tag] -= 1
            box = mail.get((peer, event.lane), deque()) if event.mail else deque([tag])
            if expected[peer, tag] < 0 or not box or box.popleft() != tag:
                raise NoCommonOrderError
        elif kind in MEETINGS or kind == "issue":
            step = "joint", peer, counts[peer]
            counts[peer] += 1
            steps.joint[step] = event
            counts["issued", peer, tag] += kind == "issue"
        elif kind == "wait_issued":
            counts["issued", peer, tag] -= 1
            if counts["issued", peer, tag] < 0:
                raise NoCommonOrderError
        elif kind not in ALONE and kind not in ("wait_send", "wait_sends"):
            raise NoCommonOrderError
        if step is not None and steps.order[-1:] != [step]:
            steps.order.append(step)
            waits = False
        elif step is not None and waits:
            raise NoCommonOrderError
    if any(expected.values()) or any(event.peer not in world for event in steps.joint.values()):
        raise NoCommonOrderError
    return steps
