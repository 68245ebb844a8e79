"""Programs of a few events, and what the proof says about them."""

from __future__ import annotations

import pytest

from hires.plan import event
from hires.plan.event import MEETING, POSTS, Event
from hires.plan.prove import prove_each
from hires.plan.routes import parse_route
from hires.plan.step_order import prove_merged

KINDS = {"got": "wait_recv", "sent": "wait_send", "join": "collective", "issued": "wait_issued"}
ROUTES = {"nccl": "nccl:channel"}


def program(text: str) -> list[Event]:
    """Returns the events of a text: ``[ROUTE: ]send PEER WHAT [TAG] [@ROUTE] [KEY=VALUE]``, ...

    ``join GROUP WHAT``, ``got`` and ``issued`` stand likewise; ``sent`` alone is of all sends.
    """
    via, _, text = text.rpartition(": ")
    events = []
    for line in filter(None, text.split(", ")):
        kind, *words = line.split()
        if not words:
            events.append(Event("wait_sends", -1, 0))
            continue
        facts = {k: int(v) for k, v in (word.split("=") for word in words if "=" in word)}
        name = next((word[1:] for word in words if word[0] == "@"), via)
        peer, what, *tag = (word for word in words if "=" not in word and word[0] != "@")
        shape = (8,) if kind in ("join", "issue", "issued") else (4,)
        route = parse_route(ROUTES.get(name, name)) if name else None
        place = KINDS.get(kind, kind), int(peer), int(tag[0]) if tag else 0
        events.append(Event(*place, shape, "float32", what, route=route, **facts))
    return events


CROSSED = "deadlock: rank 0 waits for rank 1 to receive a; rank 1 waits for rank 0 to receive b"
NEVER_SENT = "rank 1 expects a from rank 0, which never sends it"
NEVER_RECEIVED = "rank 0 sends a to rank 1, which never receives it"
MIXED_UP = [
    "rank 0 sends a as [4] float32 where rank 1 expects b as [4] float32",
    "rank 0 sends b as [4] float32 where rank 1 expects a as [4] float32",
]
PAIR = [[0, 1]]
CASES: dict[str, tuple[list[str], list[list[int]], list[str]]] = {
    "halos cross if receives come first": (
        ["recv 1 b, send 1 a, got 1 b, sent 1 a", "recv 0 a, send 0 b, got 0 a, sent 0 b"], [], []
    ),
    "crossed blocking sends": (
        ["send 1 a, sent 1 a, recv 1 b, got 1 b", "send 0 b, sent, recv 0 a, got 0 a"],
        [], [CROSSED],
    ),
    # The search began at rank 0 only, whose way ends at the message that never comes.
    "ring beside a missing message": (
        ["recv 1 y 5, got 1 y 5", "recv 2 x, got 2 x, send 2 x", "recv 1 x, got 1 x, send 1 x"],
        [],
        ["deadlock: rank 1 waits for x from rank 2; rank 2 waits for x from rank 1",
         "rank 0 expects y from rank 1, which never sends it"],
    ),
    "crossed collectives": (
        ["join 0 norm, join 1 sum", "join 1 sum, join 0 norm"], PAIR * 2,
        ["deadlock: rank 0 waits for rank 1 to join norm; rank 1 waits for rank 0 to join sum"],
    ),
    "message crossed with a collective": (
        ["join 0 sum, send 1 a, sent", "recv 0 a, got 0 a, join 0 sum"], PAIR,
        ["deadlock: rank 0 waits for rank 1 to join sum; rank 1 waits for a from rank 0"],
    ),
    "collectives of one group in other orders": (
        ["join 0 a, join 0 b", "join 0 b, join 0 a"], PAIR,
        ["rank 0 calls a [8] where rank 1 of the same group calls b [8]",
         "rank 0 calls b [8] where rank 1 of the same group calls a [8]"],
    ),
    "skipped collective": (
        ["join 0 sum", "", ""], [[0, 1, 2]],
        ["rank 0 calls sum, but rank 1 and 2 of its group never does"],
    ),
    "dropped wait": (["send 1 a, sent", "recv 0 a"], [], ["rank 1 never waits for a from rank 0"]),
    "wait without a receive": (
        ["", "got 0 a"], [],
        ["no end: rank 1 waits for a from rank 0, which it has not begun to receive"],
    ),
    # The other side had sent, so nobody seemed to wait for anybody.
    "wait before the receive": (
        ["send 1 a, sent", "got 0 a, recv 0 a"], [],
        ["deadlock: rank 1 waits for a from rank 0, which it has not begun to receive"],
    ),
    "no end, with the whole way": (
        ["recv 1 x, got 1 x", "got 2 y, send 0 x, sent", ""], [],
        ["no end: rank 0 waits for x from rank 1; rank 1 waits for y from rank 2, which it has not "
         "begun to receive"],
    ),
    "rank that does not exist": (
        ["send 7 a, sent"], [], ["rank 0 sends a to rank 7, which never receives it"]
    ),
    "another tag": (
        ["send 1 a 3, sent", "recv 0 a 4, got 0 a 4"], [], [NEVER_RECEIVED, NEVER_SENT]
    ),
    # Equal in shape, so that only their names told that microbatches were mixed up.
    "messages in the wrong order": (
        ["send 1 a, send 1 b, sent", "recv 0 b, recv 0 a, got 0 b, got 0 a"], [],
        MIXED_UP,
    ),
    "what a deadlock holds up is not missing": (
        ["send 1 a, sent 1 a, recv 1 b, send 1 c 1, sent, got 1 b",
         "send 0 b, sent 0 b, recv 0 a, recv 0 c 1, got 0 a, got 0 c 1"],
        [], [CROSSED],
    ),
    # A stream has no tags: the first send meets the first receive.
    "stream": (
        ["nccl: send 1 a 1, send 1 b 2", "nccl: recv 0 a 1, recv 0 b 2, got 0 a 1, got 0 b 2"],
        [], [],
    ),
    "stream in another order": (
        ["nccl: send 1 a 1, send 1 b 2", "nccl: recv 0 b 2, recv 0 a 1, got 0 b 2, got 0 a 1"],
        [], MIXED_UP,
    ),
    "kinds of messages have streams of their own": (
        ["nccl: send 1 a 1, send 1 b 2 lane=2, sent",
         "nccl: recv 0 b 2 lane=2, recv 0 a 1, got 0 b 2 lane=2, got 0 a 1"], [], [],
    ),
    "streams hold up their own messages alone": (
        ["send 1 a 1 @gloo, send 1 b 2 @nccl, sent",
         "recv 0 b 2 @nccl, recv 0 a 1 @gloo, got 0 b 2 @nccl, got 0 a 1 @gloo"], [], [],
    ),
    "posts of one call progress together": (
        ["nccl: recv 1 b 1 channel=3 call=7, send 1 a 1 channel=3 call=7, got 1 b 1 channel=3",
         "nccl: recv 0 a 1 channel=3 call=9, send 0 b 1 channel=3 call=9, got 0 a 1 channel=3"],
        [], [],
    ),
    "posts of two calls do not": (
        ["nccl: recv 1 b 1 channel=3, send 1 a 1 channel=3, got 1 b 1 channel=3",
         "nccl: recv 0 a 1 channel=3, send 0 b 1 channel=3, got 0 a 1 channel=3"],
        [],
        ["deadlock: the stream of rank 0 must first receive b from rank 1; "
         "the stream of rank 1 must first receive a from rank 0"],
    ),
    "collectives of two backends in crossed orders": (
        ["join 0 a @mpi, join 0 b @gloo", "join 0 b @gloo, join 0 a @mpi"], PAIR,
        ["deadlock: rank 0 waits for rank 1 to join a; "
         "rank 1 waits for rank 0 to join b"],
    ),
    # Both are under way in queues of their own, so each rank may wait in its own order.
    "issued sums of two backends": (
        ["issue 0 a 1 @mpi, issue 0 b 2 @gloo, issued 0 a 1 @mpi, issued 0 b 2 @gloo",
         "issue 0 b 2 @gloo, issue 0 a 1 @mpi, issued 0 b 2 @gloo, issued 0 a 1 @mpi"], PAIR, [],
    ),
    # Rank 0 waits for the mpi sum first, which rank 1 begins behind its blocking gloo sum.
    "issued sum before a collective": (
        ["issue 0 a 1 @mpi, issued 0 a 1 @mpi, join 0 b @gloo",
         "join 0 b @gloo, issue 0 a 1 @mpi, issued 0 a 1 @mpi"], PAIR,
        ["deadlock: rank 0 waits for rank 1 to join a; "
         "rank 1 waits for rank 0 to join b"],
    ),
    "message before a collective of another backend": (
        ["send 1 x @mpi, sent 1 x @mpi, join 0 s @gloo",
         "join 0 s @gloo, recv 0 x @mpi, got 0 x @mpi"], PAIR,
        ["deadlock: rank 0 waits for rank 1 to receive x; rank 1 waits for rank 0 to join s"],
    ),
    "messages of two backends do not meet": (
        ["send 1 x @mpi", "recv 0 x @gloo, got 0 x @gloo"], [],
        ["rank 0 sends x to rank 1, which never receives it",
         "rank 1 expects x from rank 0, which never sends it"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdict_of_a_program(name, monkeypatch):
    texts, groups, problems = CASES[name]
    programs = [*map(program, texts)]
    assert prove_each(programs, groups) == problems
    waits = ("wait_recv", "wait_send", "wait_sends", "wait_issued")
    roles = {f"new {role}": role for role in (MEETING, "issue", *POSTS, *waits)}
    monkeypatch.setattr(event, "_ROLES", event._ROLES | roles)
    renamed = [[one._replace(kind=f"new {one.role}") for one in events] for events in programs]
    assert prove_each(renamed, groups) == problems
    # A proof of merged events contradicts none of each rank.
    in_order = prove_merged([*map(iter, programs)], groups)
    assert not (in_order and problems)


def test_both_sides_of_messages_and_collectives_are_compared():
    first = program("send 1 a, sent, join 0 sum")
    first[-1] = first[-1]._replace(route=parse_route("gloo"), traffic="gradient")
    receive, wait, _ = program("recv 0 a, got 0 a, join 0 sum")
    rest = [wait, first[-1]]
    assert not prove_each([first, [receive, *rest]], PAIR)
    for change, words in (({"shape": (5,)}, "[5] float32"), ({"dtype": "int8"}, "[4] int8")):
        assert prove_each([first, [receive._replace(**change), *rest]], PAIR) == [
            f"rank 0 sends a as [4] float32 where rank 1 expects a as {words}"
        ]
