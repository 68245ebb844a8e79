"""The abstract machine: programs of a few events, and what it says about them."""

from __future__ import annotations

import pytest

from hires.plan.event import Event
from hires.plan.proof.prove import run_machine

KINDS = {"got": "wait_recv", "sent": "wait_send", "join": "collective"}


def program(text: str) -> list[Event]:
    """Returns the events of a text: ``send PEER WHAT [TAG]``, ``join GROUP WHAT``, ``sent``."""
    events = []
    for line in filter(None, text.split(", ")):
        kind, *words = line.split()
        if not words:
            events.append(Event("wait_sends", -1, 0))
            continue
        peer, what, tag = int(words[0]), words[1], int(words[2]) if words[2:] else 0
        posts = kind in ("send", "recv", "join")
        shape, dtype = ((8,) if kind == "join" else (4,), "float32") if posts else ((), "")
        events.append(Event(KINDS.get(kind, kind), peer, tag, shape, dtype, what))
    return events


CROSSED = "deadlock: rank 0 waits for rank 1 to receive a; rank 1 waits for rank 0 to receive b"
NEVER_SENT = "rank 1 expects a from rank 0, which never sends it"
NEVER_RECEIVED = "rank 0 sends a to rank 1, which never receives it"
PAIR = [[0, 1]]
CASES: dict[str, tuple[list[str], list[list[int]], list[str]]] = {
    "nothing": (["", ""], [], []),
    "late receive": (["send 1 a, sent 1 a", "recv 0 a, got 0 a"], [], []),
    "halos cross if receives come first": (
        ["recv 1 b, send 1 a, got 1 b, sent 1 a", "recv 0 a, send 0 b, got 0 a, sent 0 b"], [], []
    ),
    "crossed blocking sends": (
        ["send 1 a, sent 1 a, recv 1 b, got 1 b", "send 0 b, sent, recv 0 a, got 0 a"],
        [], [CROSSED],
    ),
    "ring without its bystander": (
        ["recv 1 x, got 1 x", "recv 3 x, got 3 x, send 0 x, send 2 x, sent",
         "recv 1 x, got 1 x, send 3 x, sent", "recv 2 x, got 2 x, send 1 x, sent"],
        [],
        ["deadlock: rank 1 waits for x from rank 3; rank 3 waits for x from rank 2; rank 2 waits "
         "for x from rank 1"],
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
         "rank 1 calls a [8] where rank 0 of the same group calls b [8]"],
    ),
    "skipped collective": (
        ["join 0 sum", "", ""], [[0, 1, 2]],
        ["rank 0 calls sum, but rank 1 and 2 of its group never does"],
    ),
    "collective of another group": (
        ["join 0 sum", "join 0 sum"], [[1]], ["rank 0 is no member of the group [1] of sum"]
    ),
    # The receiver's wait was called a deadlock although nobody waits in a circle.
    "dropped send": (["", "recv 0 a, got 0 a"], [], [NEVER_SENT]),
    "dropped receive": (["send 1 a, sent", ""], [], [NEVER_RECEIVED]),
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
    "another peer": (
        ["send 2 a, sent", "recv 0 a, got 0 a", ""], [],
        ["rank 0 sends a to rank 2, which never receives it", NEVER_SENT],
    ),
    "another tag": (
        ["send 1 a 3, sent", "recv 0 a 4, got 0 a 4"], [], [NEVER_RECEIVED, NEVER_SENT]
    ),
    # Equal in shape, so that only their names told that microbatches were mixed up.
    "messages in the wrong order": (
        ["send 1 a, send 1 b, sent", "recv 0 b, recv 0 a, got 0 b, got 0 a"], [],
        ["rank 0 sends a as [4] float32 where rank 1 expects b as [4] float32",
         "rank 0 sends b as [4] float32 where rank 1 expects a as [4] float32"],
    ),
    "what a deadlock holds up is not missing": (
        ["send 1 a, sent 1 a, recv 1 b, send 1 c 1, sent, got 1 b",
         "send 0 b, sent 0 b, recv 0 a, recv 0 c 1, got 0 a, got 0 c 1"],
        [], [CROSSED],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdict_of_a_program(name):
    texts, groups, problems = CASES[name]
    assert run_machine([*map(program, texts)], groups).problems == problems


def test_messages_and_collectives_are_counted_and_compared():
    first = program("send 1 a, sent, join 0 sum")
    receive, *rest = program("recv 0 a, got 0 a, join 0 sum")
    proof = run_machine([first, [receive, *rest]], PAIR)
    assert (proof.num_messages, proof.num_collectives, proof.problems) == (1, 1, [])
    for change, words in (({"shape": (5,)}, "[5] float32"), ({"dtype": "int8"}, "[4] int8")):
        assert run_machine([first, [receive._replace(**change), *rest]], PAIR).problems == [
            f"rank 0 sends a as [4] float32 where rank 1 expects a as {words}"
        ]
