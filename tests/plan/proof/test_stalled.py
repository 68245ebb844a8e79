"""Stalled ranks are told in the words of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hires.core.ranks.heartbeat import RankStatus
from hires.plan import updates
from hires.plan.event import Event
from hires.plan.program import events
from hires.plan.stalled import Stall, stall
from tests.helpers.small_plans import LAYOUTS, plan_of


def first(rank: int, kind: str, words: str) -> Event:
    """Returns a rank's first communication of a kind whose words hold some others."""
    found = events(plan_of(**LAYOUTS["pp"]), rank)
    return next(event for event in found if event.kind == kind and words in event.what)


def at(
    rank: int, event: Event | None = None, action: str = "F0", since_s: float = 9.0
) -> RankStatus:
    """Returns a rank that waits for a message, or for nothing."""
    if event is None:
        return RankStatus(rank, 4, action, since_s=since_s)
    verb = "a receive from" if event.kind == "recv" else "a send to"
    what = f"{verb} rank {event.peer}"
    place = {"operation": event.kind, "peer": event.peer, "tag": event.tag}
    return RankStatus(rank, 4, action, what, **place, since_s=since_s)


def judged(*statuses: RankStatus, layout: str = "pp") -> Stall:
    plan = plan_of(**LAYOUTS[layout])
    return stall(plan, {status.rank: status for status in statuses})


def test_message_between_stages_is_named_with_its_shape():
    wanted = first(1, "recv", " in F1")
    found = judged(at(0, action="F1"), at(1, wanted, "F1"))
    shape = "x".join(map(str, wanted.shape))
    assert found.culprits == [0]
    assert found.waits[0].text == f"rank 1 waits for {wanted.what} from rank 0, since 9.0 s"
    assert found.unmatched == [
        f"{wanted.what}, {shape} float32, from rank 0 to rank 1: rank 0 has not sent it"
    ]
    [text] = judged(at(0, action="F2"), at(1, wanted, "F1")).unmatched
    assert "rank 0 reports a later action, so the message was lost" in text


def test_collective_is_named_by_its_place_in_the_action():
    program = events(plan_of(**LAYOUTS["sp rows"]), 0)
    second = [e for e in program if e.kind == "collective" and "in F0" in e.what][1]
    waiting = [
        RankStatus(rank, 4, "F0", "x", ranks=[0, 1, 2], nth=nth, since_s=9.0 - nth, operation=name)
        for name in ["all_gather"]
        for rank, nth in enumerate((1, 0, 1))
    ]
    found = judged(*waiting, layout="sp rows")
    assert found.waits[1].what == second.what
    assert found.waits[1].others == [1]
    assert found.circle  # rank 1 waits in another collective for those that wait for it


FINITE, NORM = "the agreement that all gradients are finite", "the norm of all gradients"
AT_THE_END = [
    ("reduce_scatter", [0, 2], {"scatters": True}, "gradients of stage 0, part 1 of 2"),
    ("all_gather", [0, 2], {"scatters": True}, "parameters of stage 0"),
    ("broadcast", [0, 2], {}, "parameters of stage 0 from rank 0 (or a later one)"),
    ("all_reduce", [0, 2], {"gradients": "chain"}, "gradients of stage 0, part 1 of 3 (or"),
    ("all_reduce", [0, 1, 2, 3], {"scales_loss": True}, FINITE),
    ("all_reduce", [0, 1, 2, 3], {"clips_gradients": True}, NORM),
]


@pytest.mark.parametrize(("operation", "ranks", "facts", "words"), AT_THE_END)
def test_collective_behind_the_passes_is_named_too(operation, ranks, facts, words, monkeypatch):
    monkeypatch.setattr(updates, "ALONE_BYTES", 4 * 4 * 4 * 9)
    plan = replace(plan_of(stages=2, replicas=2), shards_optimizer=True, **facts)
    status = RankStatus(0, 4, "", "x", ranks=ranks, operation=operation)
    [wait] = stall(plan, {0: status, ranks[-1]: RankStatus(ranks[-1], 4)}).waits
    assert words in wait.what
    assert wait.others == ranks[1:]


def test_rank_that_does_not_answer_is_to_blame_for_a_barrier():
    barrier, ranks = "a barrier of all ranks", [0, 1, 2]
    found = judged(*(RankStatus(rank, 3, "", barrier, ranks=ranks) for rank in (0, 2)))
    assert found.culprits == [1]
    assert found.unmatched == [f"{barrier}: rank 1 has not come to it"]
    assert found.waits[0].text == f"rank 0 waits for rank 1 to join {barrier}, since 0.0 s"


def test_ranks_that_wait_for_each_other_are_a_circle():
    down, back = first(1, "recv", " in F1"), first(0, "recv", " in B0")
    stalled = judged(at(0, back, "B0"), at(1, down, "F1"))
    assert (stalled.culprits, sorted(stalled.circle)) == ([], [0, 1])
    sent = first(0, "send", " in F0")
    text = judged(at(0, sent, ""), at(1)).unmatched[0]
    assert "rank 1 has not begun to receive it" in text
