"""Halos in the memory of one machine: what holds a rank up there, and what is said about it."""

from __future__ import annotations

import pytest

from hires.core.ranks import mailbox_limits
from hires.plan.event import Event
from hires.plan.plan import Finding
from hires.plan.program import events
from hires.plan.proof.prove import run_machine, verify
from hires.plan.proof.semantics import MAILBOXES, RENDEZVOUS
from tests.helpers.damage import prove
from tests.helpers.small_plans import LAYOUTS, plan_of

NUMBERS = range(1, mailbox_limits.SLOTS + 2)
"""One halo more than there are places."""


def halo(kind: str, peer: int, number: int, mail: bool = True, lane: int = 1) -> Event:
    return Event(kind, peer, number, (4,), "float32", f"halo {number}", lane, mail)


def problems(*programs: list[Event], semantics: str = MAILBOXES) -> list[str]:
    return run_machine(list(programs), [], semantics).problems


def all_of(kind: str, peer: int, **facts) -> list[Event]:
    return [halo(kind, peer, number, **facts) for number in NUMBERS]


def test_as_many_halos_as_there_are_places_need_no_reader():
    first = [*all_of("send", 1)[:-1], Event("wait_sends", -1, 0)]
    [text, *_] = problems(first, [])
    assert text == "rank 0 sends halo 1 to rank 1, which never receives it"
    assert run_machine([first, []], [], MAILBOXES).stuck == []


def test_one_more_waits_for_the_reader():
    programs = [
        [*all_of("recv", peer), *all_of("send", peer), *all_of("wait_recv", peer)]
        for peer in (1, 0)
    ]
    assert problems(*programs, semantics=RENDEZVOUS) == []
    assert problems(*programs) == [
        "deadlock: rank 0 waits for rank 1 to read older messages, to make room for halo 3; "
        "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
    ]


def test_reading_makes_room():
    first = [*all_of("send", 1)]
    second = [*all_of("recv", 0), *all_of("wait_recv", 0)]
    proof = run_machine([first, second], [], MAILBOXES)
    assert (proof.problems, proof.num_messages) == ([], len(NUMBERS))


def test_halos_of_each_direction_have_places_of_their_own():
    up = all_of("send", 1, lane=2)
    ways = [*all_of("recv", 0), *all_of("recv", 0, lane=2)]
    reads = [*all_of("wait_recv", 0, lane=2), *all_of("wait_recv", 0)]
    # Those of the one direction lie unread while those of the other are read.
    assert problems([*all_of("send", 1)[:-1], *up, all_of("send", 1)[-1]], [*ways, *reads]) == []


def test_tags_do_not_tell_messages_apart():
    first = [halo("send", 1, 1), halo("send", 1, 2)]
    second = [halo(kind, 0, number) for kind in ("recv", "wait_recv") for number in (2, 1)]
    assert problems(first, second, semantics=RENDEZVOUS) == []
    text = problems(first, second)[0]
    assert text.startswith("rank 0 sends halo 1 as [4] float32 where rank 1 expects halo 2 as ")


def test_reading_in_another_order_stops_the_rank():
    first = [halo("send", 1, 1), halo("send", 1, 2)]
    second = [halo("recv", 0, 1), halo("recv", 0, 2), halo("wait_recv", 0, 2)]
    proof = run_machine([first, [*second, halo("wait_recv", 0, 1)]], [], MAILBOXES)
    assert proof.stuck == [1]
    assert proof.problems == [
        "rank 1 waits for halo 2 from rank 0 before halo 1, which lies first in its mailbox"
    ]


@pytest.mark.parametrize("large", [True, False])
def test_a_large_halo_that_is_sent_can_block_small_ones_that_are_not(large: bool):
    # The first rank waits until its large halo is taken, the second for room: each way alone is
    # safe, both together are not. So the proof must know which halo goes which way.
    big = [halo(kind, 1, 9, mail=not large) for kind in ("send", "wait_send")]
    first = [*all_of("recv", 1), *big, *all_of("wait_recv", 1)]
    taken = [halo(kind, 0, 9, mail=not large) for kind in ("recv", "wait_recv")]
    second = [*all_of("send", 0), *taken]
    assert problems(first, second, semantics=RENDEZVOUS) == []
    found = problems(first, second)
    assert found == (
        [
            "deadlock: rank 0 waits for rank 1 to receive halo 9; "
            "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
        ]
        if large
        else []
    )


def test_size_decides_which_halos_are_mailed(monkeypatch):
    plan = plan_of(**LAYOUTS["sp grid"])
    halos = [e for e in events(plan, 0) if e.kind == "send"]
    assert all(event.mail for event in halos)
    assert not any(event.mail for event in events(plan_of(**LAYOUTS["pp"]), 0))
    monkeypatch.setattr(mailbox_limits, "MAIL_BYTES", 128)
    mailed = {event.mail: event.shape for event in events(plan, 0) if event.kind == "send"}
    assert set(mailed) == {True, False}
    for event in events(plan, 0):
        if event.kind == "send":
            num_bytes = 4
            for length in event.shape:
                num_bytes *= length
            assert event.mail == (num_bytes <= 128)


@pytest.mark.parametrize("most", [0, 128, 2**18])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_runs_through_mailboxes(name, most, monkeypatch):
    monkeypatch.setattr(mailbox_limits, "MAIL_BYTES", most)
    assert prove(plan_of(**LAYOUTS[name]), MAILBOXES).problems == []


def test_tiles_that_look_too_far_ahead_are_an_error(monkeypatch):
    plan = plan_of(**LAYOUTS["sp columns"])
    assert verify(plan) == []

    def ahead(plan, rank, order):
        """All halos set out before the first one is read; a rendezvous bears that."""
        posts = [e for e in events(plan, rank, order) if e.kind in ("send", "recv")]
        return [*posts, *(e for e in events(plan, rank, order) if e not in posts)]

    monkeypatch.setattr("hires.plan.proof.prove.events", ahead)
    assert prove(plan, RENDEZVOUS).problems == []
    found = verify(plan)
    assert isinstance(found[0], Finding)
    assert found[0].severity == "error"
    assert found[0].text.startswith("deadlock: rank 0 waits for rank 1 to read older messages")
