"""Proves plans in which all ranks post and wait in step, without the abstract machine.

The machine has one outcome (``hires.plan.proof.machine``), so any one order of the ranks decides.
Here all ranks go round by round: each makes its posts up to its first wait, then all its waits:

    rank 0   recv send | wait wait collective | recv send | wait wait
    rank 1   recv send | wait wait collective | recv send | wait wait
             round 1                          | round 2

A round ends, with nothing left over, under every semantics in ``SEMANTICS`` if

* each message is sent and received in it, and no other from its source to its target has its tag
  or its lane: a rendezvous has one partner, a mailbox never holds more than this one, a stream
  runs it at once;
* each rank waits for exactly what it posted;
* all ranks of the world come to the same collectives in the same order.

A grid of tiles without a pipeline is of this kind. For any other plan, and for a wrong one, there
is no proof here, and the machine decides and explains. The programs are read once and not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hires.plan.event import ALONE, MEETINGS, POSTS, Event
from hires.plan.proof.machine import MAILBOXES, RENDEZVOUS, SEPARATE
from hires.plan.proof.walk import WORLD, Proof

SEMANTICS = (RENDEZVOUS, MAILBOXES, SEPARATE)
"""Under these a round ends as described. Pair streams have no lanes."""

JOINT = (*MEETINGS, "issue", "wait_issued")
"""Events at which all ranks of the world come together."""

Way = tuple[int, int, int]
"""(source, target, lane)."""


class NotInStepError(Exception):
    """The ranks do not go in step, which does not mean that they block each other."""


def prove_in_rounds(
    programs: Sequence[Iterator[Event]], members: Sequence[Sequence[int]]
) -> Proof | None:
    """Returns the proof of programs whose ranks go in step, or None: then the machine decides.

    Args:
        programs: what each rank does, in order.
        members: the ranks of each group.
    """
    proof, issued = Proof(), Counter[tuple[int, int]]()
    world = {WORLD, *(i for i, ranks in enumerate(members) if len(set(ranks)) == len(programs))}
    heads = [next(program, None) for program in programs]
    try:
        while any(head is not None for head in heads):
            unmet: dict[Way, Event] = {}
            first: list[Event] | None = None
            for rank, program in enumerate(programs):
                heads[rank], joint, met = _round(rank, heads[rank], program, unmet)
                proof.num_messages += met
                if first is not None and joint != first:
                    raise NotInStepError
                first = joint
            if unmet:
                raise NotInStepError
            for event in first or ():
                key = event.peer, event.tag
                issued[key] += (event.kind == "issue") - (event.kind == "wait_issued")
                if event.kind not in JOINT or event.peer not in world or issued[key] < 0:
                    raise NotInStepError
                proof.num_collectives += event.kind in ("collective", "issue")
    except NotInStepError:
        return None
    return proof


def _round(
    rank: int, event: Event | None, program: Iterator[Event], unmet: dict[Way, Event]
) -> tuple[Event | None, list[Event], int]:
    """Takes a rank through one round.

    Args:
        rank: of the replica.
        event: its first of the round; None at its end.
        program: its events behind that one.
        unmet: messages of the round of which one side is posted, by way.

    Returns:
        The first event of its next round, its collectives and sums, and how many messages met.
    """
    posted: dict[tuple[str, int, int], Event] = {}
    joint: list[Event] = []
    tags: set[tuple[str, int, int]] = set()
    waits, met = False, 0
    while event is not None:
        kind, peer, lane = event.kind, event.peer, event.lane
        if kind in POSTS:
            if waits:
                break
            key, tagged = (f"wait_{kind}", peer, lane), (kind, peer, event.tag)
            if key in posted or tagged in tags:
                raise NotInStepError
            posted[key] = event
            tags.add(tagged)
            way = (rank, peer, lane) if kind == "send" else (peer, rank, lane)
            other = unmet.pop(way, None)
            if other is None:
                unmet[way] = event
            # Equal: tag, shape, dtype, words, lane, and whether it goes through memory.
            elif other.kind == kind or other[2:8] != event[2:8]:
                raise NotInStepError
            met += other is not None
        elif kind in ("wait_send", "wait_recv"):
            waits = True
            post = posted.pop((kind, peer, lane), None)
            if post is None or post.tag != event.tag or post.mail != event.mail:
                raise NotInStepError
        elif kind == "issue" and waits:
            break
        elif kind not in ALONE:
            waits = waits or kind != "issue"
            if kind != "wait_sends":
                joint.append(event)
        event = next(program, None)
    if posted:
        raise NotInStepError
    return event, joint, met
