"""The check of the calls of ranks: threads that stand for ranks, and a board in memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hires.comm import call_board, sequence_check
from hires.comm.call_board import BoardConnection, BoardServer, CallBoard
from hires.comm.sequence_check import Board, SequenceCheck
from hires.core.errors import CommError
from hires.core.ranks.call_records import CallFacts
from hires.core.ranks.heartbeat import Activity
from tests.helpers.patience import PATIENCE_S

SUM = CallFacts("all_reduce", 4096, "float32", "gloo")
ROOTED = CallFacts("broadcast", 8, "int64", "gloo")
SUM.may_abort = ROOTED.may_abort = False  # their first calls were compared


class Rank:
    """A rank that waits where it is told."""

    def __init__(self, board: Board, rank: int, every: bool, timeout_s: float) -> None:
        self.activity = Activity()
        self.check = SequenceCheck(board, rank, 2, timeout_s, self.activity, every)

    def call(self, facts: CallFacts, agreed: object = None, name: str = "gloo") -> int:
        ring = self.check.ring
        return self.check.note(ring.channel(name, [0, 1]), facts, agreed)

    def wait(self, number: int) -> None:
        self.activity.begin("a sum", number=number)


@contextlib.contextmanager
def ranks(every: bool = False, timeout_s: float = 1.0) -> Iterator[list[Rank]]:
    board = CallBoard()
    made = [Rank(board, rank, every, timeout_s) for rank in (0, 1)]
    try:
        yield made
    finally:
        for rank in made:
            with contextlib.suppress(CommError):
                rank.check.close()


def test_rank_0_leaves_the_others_what_it_called(monkeypatch: pytest.MonkeyPatch):
    """Its board lives for a second, and a wait is looked at after a third of the timeout."""
    monkeypatch.setattr(sequence_check, "LINGER_S", 0.0)
    board = CallBoard()
    server = BoardServer(board, "127.0.0.1")
    connection = BoardConnection("127.0.0.1", server.place, PATIENCE_S)
    first, second = (
        SequenceCheck(one, rank, 3, 60.0, Activity(), server=other)
        for rank, (one, other) in enumerate([(board, server), (connection, None)])
    )
    for check, operation, tag in ((first, "send", 3), (second, "recv", 4)):
        channel = check.ring.channel(f"messages 0 to 1, tag {tag}, in all ranks over shm", [0, 1])
        number = check.note(channel, CallFacts(operation, 8, "int8", "shm"))
    first.close()
    text = second.reason(number)
    assert "rank 0 has left the world, and its last call was send of 8 B int8" in text
    assert text.endswith("rank 0 sends tag 3, and rank 1 waits for tag 4")
    number = second.note(second.ring.channel("all ranks over gloo", [0, 1, 2]), SUM)
    assert "rank 2 gives no answer: answers come through rank 0, which gives none" in second.reason(
        number
    )
    number = second.note(
        second.ring.channel("messages 0 to 1, tag 3, in all ranks over shm", [0, 1]),
        CallFacts("recv", 4, "int8", "shm"),
    )
    with pytest.raises(CommError, match=r"send of 8 B int8 .* where rank 1 calls recv of 4 B int8"):
        second.close()


def test_calls_in_another_order_that_are_older_than_what_is_kept_are_found():
    other = CallFacts("broadcast", 4096, "float32", "shm")
    mine = CallFacts("all_reduce", 4096, "float32", "shm")
    with ranks() as (first, second):
        for rank, order in ((first, (mine, other)), (second, (other, mine))):
            for facts in (*order, *[mine] * 200):
                rank.call(facts, None, "shm")
        first.check.close()
        with pytest.raises(CommError, match="made different calls in shm before call"):
            second.check.close()


@pytest.mark.parametrize("fails", [False, True])
def test_message_that_no_rank_receives_is_named_at_the_end(fails: bool):
    send, recv = (CallFacts(name, 8, "int8", "shm") for name in ("send", "recv"))
    names = [f"messages 0 to 1, tag {tag}, in all ranks over shm" for tag in range(100)]
    with ranks() as (first, second):
        for name in names:  # more than a record holds
            first.call(send, None, name)
            second.call(recv, None, name)
        first.call(send, None, names[-1])
        first.check.has_failed = fails
        first.check.close()
        if fails:  # that error says it
            second.check.close()
            return
        text = "0 to rank 1: 101 sent, 100 received: .* tag 99, has no other side"
        with pytest.raises(CommError, match=text):
            second.check.close()


def test_first_call_of_a_size_is_compared_before_gloo_could_end_the_process_or_mpi_be_wrong():
    def facts(num_bytes: int, route: str = "gloo") -> CallFacts:
        return CallFacts("all_reduce", num_bytes, "float32", route)  # of one rank, as in a run

    with ranks() as (first, second):
        for route in ("gloo", "gloo:segmented:1MiB", "mpi"):
            name = f"all ranks over {route}"
            first.call(facts(8, route), name=name)
            second.call(facts(8, route), name=name)
            first.call(facts(16, route), name=name)
            with pytest.raises(CommError, match=r"16 B float32 .* where rank 1 .* of 8 B"):
                second.call(facts(8, route), name=name)
            with pytest.raises(CommError, match=r"(?s)was not begun.*8 B"):
                second.call(facts(16, route), name=name)  # it would be paired with another call
        first.call(facts(8, "shm"), name="shm")
        second.call(facts(16, "shm"), name="shm")  # which reports it
        known = facts(8), facts(8)
        for rank, one in zip((first, second), known, strict=True):
            rank.call(one, name="again")
        first.call(facts(16), name="again")
        second.call(known[1], name="again")  # a size of this rank that is not new


def test_board_answers_ranks_and_drops_strangers(monkeypatch: pytest.MonkeyPatch):
    board = CallBoard()
    server = BoardServer(board, "127.0.0.1")
    rank = BoardConnection("127.0.0.1", server.place, PATIENCE_S)
    port = int(server.place.partition(" ")[0])
    token = server.place.partition(" ")[2].encode()
    strangers = [b"GET / HTTP/1.1\r\n\r\n", b"x" * 10**6, token + b'\n["run", []]\n', b"[" * 99]
    strangers += [token + b"\n" + b"[" * 10**5 + b"\n", token + b'\n["put", []]\n']
    strangers += [b'x\n["put", [1, 9, "false"]]\n', b"x" * len(token) + b'\n["ask", []]\n']
    for text in strangers:
        other = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        with other, contextlib.suppress(OSError):
            other.sendall(text)
            assert other.recv(1) == b""
    rank.put(1, rank.ask(), "text")
    assert rank.get([0, 1]) == {"1": [1, "text"]}
    assert board.get([1]) == {"1": (1, "text")}
    assert [rank.first("a", "one"), board.first("a", "two"), rank.look()] == ["one", "one", 1]
    monkeypatch.setattr(call_board, "STRANGER_S", 0.2)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as silent:
        assert silent.recv(1) == b""
    assert rank.look() == 1  # ranks stay
    server.close()
    with pytest.raises(OSError):  # noqa: PT011 - of the system
        rank.look()
    rank.close()
