"""The check of the calls of ranks: threads that stand for ranks, and a folder."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hires.comm.backends.stores import FolderStore, signed
from hires.comm.sequence_check import CallBoard, SequenceCheck
from hires.core.errors import CommError
from hires.core.ranks.call_records import CallFacts
from hires.core.ranks.heartbeat import Activity

SUM = CallFacts("all_reduce", 4096, "float32", "gloo")
ROOTED = CallFacts("broadcast", 8, "int64", "gloo")
SUM.may_abort = ROOTED.may_abort = False  # their first calls were compared


class Rank:
    """A rank that waits where it is told."""

    def __init__(self, board: CallBoard, rank: int, every: bool, timeout_s: float) -> None:
        self.activity = Activity()
        self.check = SequenceCheck(board, rank, 2, timeout_s, self.activity, every)

    def call(self, facts: CallFacts, agreed: object = None, name: str = "gloo") -> int:
        ring = self.check.ring
        return self.check.note(ring.channel(name, [0, 1]), facts, agreed)

    def wait(self, number: int) -> None:
        self.activity.begin("a sum", number=number)


@contextlib.contextmanager
def boards(number: int) -> Iterator[tuple[str, list[CallBoard]]]:
    """Yields a folder that is the store of some ranks, and the board of each."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder, [CallBoard(FolderStore(Path(folder))) for _ in range(number)]


@contextlib.contextmanager
def ranks(every: bool = False, timeout_s: float = 1.0) -> Iterator[list[Rank]]:
    with boards(2) as (_, own):
        made = [Rank(board, rank, every, timeout_s) for rank, board in enumerate(own)]
        try:
            yield made
        finally:
            for rank in made:
                with contextlib.suppress(CommError):
                    rank.check.close()


def test_ranks_keep_what_the_others_called_before_rank_0_leaves():
    """A wait is looked at after a third of the timeout, and the store ends with rank 0."""
    with boards(2) as (folder, (mine, other)):
        first, second = (
            SequenceCheck(one, rank, 3, 60.0, Activity()) for rank, one in enumerate((mine, other))
        )
        for check, operation, tag in ((first, "send", 3), (second, "recv", 4)):
            channel = check.ring.channel(
                f"messages 0 to 1, tag {tag}, in all ranks over shm", [0, 1]
            )
            number = check.note(channel, CallFacts(operation, 8, "int8", "shm"))
        first.close()
        shutil.rmtree(folder)
        text = second.reason(number)
        assert "rank 0 has left the world, and its last call was send of 8 B int8" in text
        number = second.note(second.ring.channel("all ranks over gloo", [0, 1, 2]), SUM)
        text = second.reason(number)
        assert "rank 2 gives no answer: answers come through rank 0, which gives none" in text
        number = second.note(
            second.ring.channel("messages 0 to 1, tag 3, in all ranks over shm", [0, 1]),
            CallFacts("recv", 4, "int8", "shm"),
        )
        with pytest.raises(CommError, match=r"send of 8 B int8 .* where rank 1 calls recv of 4 B"):
            second.close()


def test_store_of_several_machines_takes_what_a_folder_does_and_proves_it():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    secret = signed(store, "0123456789abcdef")
    board, stranger = CallBoard(secret), CallBoard(store)
    assert [board.first("a", "one"), board.first("a", "two"), board.ask()] == ["one", "one", 1]
    board.put(1, board.look(), "text")
    assert board.get([0, 1]) == {1: (1, "text")}
    stranger.put(1, 9, "false")
    assert board.get([0, 1]) == {}


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
        text = "0 to rank 1: 101 sent, 100 received"
        with pytest.raises(CommError, match=text):
            second.check.close()


def test_collective_that_one_rank_alone_began_is_named_at_the_end():
    facts = CallFacts("all_reduce", 8, "int8", "shm")
    with ranks() as (first, second):
        for rank in (first, second):
            rank.call(facts, None, "shm")
        second.call(facts, None, "shm")
        first.check.close()
        with pytest.raises(CommError, match=r"rank 0 left without all_reduce of 8 B int8 .* of ra"):
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
