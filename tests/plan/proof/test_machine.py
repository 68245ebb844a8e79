"""The abstract machine: programs of a few events, and what it says about them."""

from __future__ import annotations

import pytest

from hires.plan.event import Event
from hires.plan.proof.prove import run_machine


def send(peer: int, what: str, tag: int = 0, shape: tuple[int, ...] = (4,)) -> Event:
    return Event("send", peer, tag, shape, "float32", what)


def recv(peer: int, what: str, tag: int = 0, shape: tuple[int, ...] = (4,)) -> Event:
    return Event("recv", peer, tag, shape, "float32", what)


def got(peer: int, what: str, tag: int = 0) -> Event:
    return Event("wait_recv", peer, tag, what=what)


def sent(peer: int, what: str, tag: int = 0) -> Event:
    return Event("wait_send", peer, tag, what=what)


def together(group: int, what: str) -> Event:
    return Event("collective", group, 0, (8,), "float32", what)


SENT = Event("wait_sends", -1, 0)


def problems(*programs: list[Event], groups: tuple[list[int], ...] = ()) -> list[str]:
    return run_machine(list(programs), list(groups)).problems


def test_nothing_to_say_is_fine():
    assert problems([], []) == []


def test_message_and_collective_are_counted():
    proof = run_machine(
        [
            [send(1, "a"), SENT, together(0, "sum")],
            [recv(0, "a"), got(0, "a"), together(0, "sum")],
        ],
        [[0, 1]],
    )
    assert (proof.num_messages, proof.num_collectives, proof.problems) == (1, 1, [])


def test_receive_may_be_posted_after_the_send():
    assert problems([send(1, "a"), sent(1, "a")], [recv(0, "a"), got(0, "a")]) == []


def test_halos_cross_if_receives_are_posted_first():
    def exchange(peer: int, mine: str, theirs: str) -> list[Event]:
        return [recv(peer, theirs), send(peer, mine), got(peer, theirs), sent(peer, mine)]

    assert problems(exchange(1, "a", "b"), exchange(0, "b", "a")) == []


def test_crossed_blocking_sends_are_a_deadlock():
    assert problems(
        [send(1, "a"), sent(1, "a"), recv(1, "b"), got(1, "b")],
        [send(0, "b"), SENT, recv(0, "a"), got(0, "a")],
    ) == ["deadlock: rank 0 waits for rank 1 to receive a; rank 1 waits for rank 0 to receive b"]


def test_ring_of_receives_is_named_and_bystanders_are_not():
    def late(source: int, *targets: int) -> list[Event]:
        return [recv(source, "x"), got(source, "x"), *(send(t, "x") for t in targets), SENT]

    bystander = [recv(1, "x"), got(1, "x")]
    assert problems(bystander, late(3, 0, 2), late(1, 3), late(2, 1)) == [
        "deadlock: rank 1 waits for x from rank 3; rank 3 waits for x from rank 2; "
        "rank 2 waits for x from rank 1"
    ]


def test_ring_is_found_beside_a_missing_message():
    # The search began at rank 0 only, whose way ends at the message that never comes.
    ring = [[recv(peer, "x"), got(peer, "x"), send(peer, "x")] for peer in (2, 1)]
    assert problems([recv(1, "y", 5), got(1, "y", 5)], *ring) == [
        "deadlock: rank 1 waits for x from rank 2; rank 2 waits for x from rank 1",
        "rank 0 expects y from rank 1, which never sends it",
    ]


def test_crossed_collectives_are_a_deadlock():
    assert problems(
        [together(0, "norm"), together(1, "gradients")],
        [together(1, "gradients"), together(0, "norm")],
        groups=([0, 1], [0, 1]),
    ) == [
        "deadlock: rank 0 waits for rank 1 to join norm; rank 1 waits for rank 0 to join gradients"
    ]


def test_message_crossed_with_a_collective_is_a_deadlock():
    assert problems(
        [together(0, "sum"), send(1, "a"), SENT],
        [recv(0, "a"), got(0, "a"), together(0, "sum")],
        groups=([0, 1],),
    ) == ["deadlock: rank 0 waits for rank 1 to join sum; rank 1 waits for a from rank 0"]


def test_reordered_collectives_of_one_group_are_named():
    assert problems(
        [together(0, "norm of bn1"), together(0, "norm of bn2")],
        [together(0, "norm of bn2"), together(0, "norm of bn1")],
        groups=([0, 1],),
    )[0] == ("rank 0 calls norm of bn1 [8] where rank 1 of the same group calls norm of bn2 [8]")


def test_collective_that_one_rank_skips():
    assert problems([together(0, "sum")], [], [], groups=([0, 1, 2],)) == [
        "rank 0 calls sum, but rank 1 and 2 of its group never does"
    ]


def test_collective_of_another_group_is_reported_once():
    assert problems([together(0, "sum")], [together(0, "sum")], groups=([1],)) == [
        "rank 0 is no member of the group [1] of sum"
    ]


def test_dropped_send_is_no_deadlock():
    # The receiver's wait was called a deadlock although nobody waits in a circle.
    assert problems([], [recv(0, "a"), got(0, "a")]) == [
        "rank 1 expects a from rank 0, which never sends it"
    ]


def test_dropped_receive():
    assert problems([send(1, "a"), SENT], []) == [
        "rank 0 sends a to rank 1, which never receives it"
    ]


def test_dropped_wait():
    assert problems([send(1, "a"), SENT], [recv(0, "a")]) == [
        "rank 1 never waits for a from rank 0"
    ]


def test_wait_without_a_receive():
    assert problems([], [got(0, "a")]) == [
        "no end: rank 1 waits for a from rank 0, which it has not begun to receive"
    ]


def test_wait_before_the_receive_is_its_own_deadlock():
    # The other side had sent, so nobody seemed to wait for anybody.
    assert problems([send(1, "a"), SENT], [got(0, "a"), recv(0, "a")]) == [
        "deadlock: rank 1 waits for a from rank 0, which it has not begun to receive"
    ]


def test_no_end_tells_the_whole_way():
    ring = [recv(1, "x"), got(1, "x")]
    assert problems(ring, [got(2, "y"), send(0, "x"), SENT], []) == [
        "no end: rank 0 waits for x from rank 1; rank 1 waits for y from rank 2, which it has not "
        "begun to receive"
    ]


def test_message_to_a_rank_that_does_not_exist():
    assert problems([send(7, "a"), SENT]) == ["rank 0 sends a to rank 7, which never receives it"]


def test_changed_peer_is_reported_on_both_sides():
    assert problems([send(2, "a"), SENT], [recv(0, "a"), got(0, "a")], []) == [
        "rank 0 sends a to rank 2, which never receives it",
        "rank 1 expects a from rank 0, which never sends it",
    ]


def test_changed_tag_is_reported_on_both_sides():
    assert problems([send(1, "a", tag=3), SENT], [recv(0, "a", tag=4), got(0, "a", tag=4)]) == [
        "rank 0 sends a to rank 1, which never receives it",
        "rank 1 expects a from rank 0, which never sends it",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"shape": (5,)}, "rank 1 expects a as [5] float32"),
        ({"dtype": "bfloat16"}, "rank 1 expects a as [4] bfloat16"),
    ],
)
def test_changed_shape_or_type(change, expected):
    wrong = recv(0, "a")._replace(**change)
    assert problems([send(1, "a"), SENT], [wrong, got(0, "a")]) == [
        f"rank 0 sends a as [4] float32 where {expected}"
    ]


def test_messages_in_the_wrong_order():
    # Equal in shape, so that only their names told that microbatches were mixed up.
    programs = (
        [send(1, "a in F0"), send(1, "a in F1"), SENT],
        [recv(0, "a in F1"), recv(0, "a in F0")],
    )
    programs[1].extend([got(0, "a in F1"), got(0, "a in F0")])
    assert problems(*programs) == [
        "rank 0 sends a in F0 as [4] float32 where rank 1 expects a in F1 as [4] float32",
        "rank 0 sends a in F1 as [4] float32 where rank 1 expects a in F0 as [4] float32",
    ]


def test_what_a_deadlock_holds_up_is_not_called_missing():
    first = [send(1, "a"), sent(1, "a"), recv(1, "b"), send(1, "c", 1), SENT, got(1, "b")]
    second = [
        send(0, "b"),
        sent(0, "b"),
        recv(0, "a"),
        recv(0, "c", 1),
        got(0, "a"),
        got(0, "c", 1),
    ]
    assert len(problems(first, second)) == 1
