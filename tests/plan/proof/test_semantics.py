"""The abstract machine on routes: streams, mailboxes, and several backends at once."""

from __future__ import annotations

import pytest

from hires.core.ranks import mailbox_limits
from hires.plan.event import WORLD, Event
from hires.plan.plan import Finding, Plan
from hires.plan.program import events
from hires.plan.proof.common_order import prove_in_order
from hires.plan.proof.prove import judged, run_machine, verify
from hires.plan.routes import Route, parse_route
from tests.helpers.small_plans import LAYOUTS, plan_of

SENT = Event("wait_sends", -1, 0)
GLOO, MPI, NCCL, SHM = map(parse_route, ("gloo", "mpi", "nccl:channel", "shm:mailbox"))


def mixed(*programs: list[Event]) -> list[str]:
    """Returns the machine's problems, if a proof by a common order does not contradict them."""
    members = [[*range(len(programs))]]
    texts = run_machine([*map(list, programs)], members).problems
    in_order = prove_in_order([*map(iter, programs)], members)
    assert in_order is None or not texts
    return texts


def joint(kind: str, what: str, route: Route, tag: int = 0) -> Event:
    return Event(kind, WORLD, tag, (4,), "float32", what, route=route)


def message(kind: str, peer: int, what: str, route: Route, tag: int = 0, **more: int) -> Event:
    return Event(kind, peer, tag, (4,), "float32", what, route=route, **more)


def received(events: list[Event]) -> list[Event]:
    """Returns the receives of these messages on the other side, and then the waits for them."""
    posts = [e._replace(kind="recv", peer=0) for e in events]
    return [*posts, *(e._replace(kind="wait_recv") for e in posts)]


def test_posts_of_a_stream_hold_up_those_behind_them():
    a, b = (message("send", 1, what, NCCL, tag) for tag, what in enumerate("ab", start=1))
    assert not mixed([a, b, SENT], received([a, b]))
    # A stream has no tags: the first send meets the first receive.
    assert mixed([a, b, SENT], received([b, a])) == [
        "rank 0 sends a as [4] float32 where rank 1 expects b as [4] float32",
        "rank 0 sends b as [4] float32 where rank 1 expects a as [4] float32",
    ]
    tagged = [[e._replace(route=GLOO) for e in program] for program in ([a, b], received([b, a]))]
    assert not mixed([*tagged[0], SENT], tagged[1])
    # Kinds of messages have streams of their own.
    halo = b._replace(lane=2)
    assert not mixed([a, halo, SENT], received([halo, a]))


def test_posts_of_one_call_progress_together():
    def exchange(peer: int, mine: str, theirs: str, call: int) -> list[Event]:
        posts = [
            message("recv", peer, theirs, NCCL, 1, channel=3, call=call),
            message("send", peer, mine, NCCL, 1, channel=3, call=call),
        ]
        return [*posts, posts[0]._replace(kind="wait_recv", call=0), SENT]

    assert mixed(exchange(1, "a", "b", 7), exchange(0, "b", "a", 9)) == []
    assert mixed(exchange(1, "a", "b", 0), exchange(0, "b", "a", 0)) == [
        "deadlock: the stream of rank 0 must first receive b from rank 1; "
        "the stream of rank 1 must first receive a from rank 0"
    ]


def test_every_backend_that_may_carry_a_plan_decides():
    plan = plan_of(**LAYOUTS["sp grid"])
    verdicts = [*judged(plan)]
    assert "shm" in verdicts[0].backends
    assert verdicts[1].backends == ["gloo"]  # where ranks share no memory when they start
    assert not any(verdict.proof.problems for verdict in verdicts)
    assert verify(plan) == []
    # A rank that takes the microbatches in another order mixes them up only where tags are unknown.
    plan = plan_of(**LAYOUTS["pp"])
    plan.schedule[0] = [plan.schedule[0][i] for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    assert verify(plan) == []
    plan.routes = [[*case, route.replace("gloo", "nccl")] for *case, route in plan.routes]
    plan = type(plan).from_dict(plan.to_dict())
    [first, *_] = verify(plan)
    assert isinstance(first, Finding)
    assert (first.severity, first.key) == ("error", "parallel")
    assert first.text.startswith("rank 0 sends ")


NUMBERS = range(1, mailbox_limits.SLOTS + 2)
"""One halo more than a mailbox has places."""


def halo(kind: str, peer: int, number: int, route: Route = SHM, lane: int = 1) -> Event:
    return message(kind, peer, f"halo {number}", route, number, lane=lane)


def all_of(kind: str, peer: int, **facts) -> list[Event]:
    return [halo(kind, peer, number, **facts) for number in NUMBERS]


def test_messages_of_memory_must_be_right_where_there_is_none(monkeypatch):
    def crossed(plan: Plan, rank: int) -> list[Event]:
        return [halo(kind, 1 - rank, 1) for kind in ("send", "wait_send", "recv", "wait_recv")]

    plan = plan_of(tiles=[2, 1])
    assert not mixed(*(crossed(plan, rank) for rank in range(2)))  # a mailbox holds them meanwhile
    monkeypatch.setattr("hires.plan.proof.prove.events", crossed)
    assert [finding.text for finding in verify(plan)] == [
        "deadlock: rank 0 waits for rank 1 to receive halo 1; "
        "rank 1 waits for rank 0 to receive halo 1"
    ]


def test_full_mailbox_waits_for_its_reader():
    def exchange(peer: int, **facts) -> list[Event]:
        return [e for kind in ("recv", "send", "wait_recv") for e in all_of(kind, peer, **facts)]

    assert mixed(exchange(1, route=GLOO), exchange(0, route=GLOO)) == []
    assert mixed(exchange(1), exchange(0)) == [
        "deadlock: rank 0 waits for rank 1 to read older messages, to make room for halo 3; "
        "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
    ]
    # Those of the one direction lie unread while those of the other are read.
    sends, up = all_of("send", 1), all_of("send", 1, lane=2)
    reads = [*all_of("recv", 0), *all_of("recv", 0, lane=2)]
    reads += [*all_of("wait_recv", 0, lane=2), *all_of("wait_recv", 0)]
    assert mixed([*sends[:-1], *up, sends[-1]], reads) == []


def test_mailbox_is_read_in_the_order_in_which_it_was_written():
    first = [halo("send", 1, 1), halo("send", 1, 2)]
    second = [halo(kind, 0, number) for kind in ("recv", "wait_recv") for number in (2, 1)]
    text = mixed(first, second)[0]
    assert text.startswith("rank 0 sends halo 1 as [4] float32 where rank 1 expects halo 2 as ")
    second = [halo("recv", 0, n) for n in (1, 2)] + [halo("wait_recv", 0, n) for n in (2, 1)]
    assert mixed(first, second) == [
        "rank 1 waits for halo 2 from rank 0 before halo 1, which lies first in its mailbox"
    ]


@pytest.mark.parametrize("large", [True, False])
def test_large_halo_that_is_sent_can_block_small_ones_that_are_not(large):
    # The first rank waits until its large halo is taken, the second for room: each way alone is
    # safe, both together are not. So the proof must know which halo goes which way.
    route = GLOO if large else SHM
    big = [halo(kind, 1, 9, route) for kind in ("send", "wait_send")]
    first = [*all_of("recv", 1), *big, *all_of("wait_recv", 1)]
    second = [*all_of("send", 0), *(halo(kind, 0, 9, route) for kind in ("recv", "wait_recv"))]
    blocked = (
        "deadlock: rank 0 waits for rank 1 to receive halo 9; "
        "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
    )
    assert mixed(first, second) == ([blocked] if large else [])


def test_size_decides_which_halos_are_mailed(monkeypatch):
    monkeypatch.setattr(mailbox_limits, "MAIL_BYTES", 128)
    sends = [e for e in events(plan_of(**LAYOUTS["sp grid"]), 0) if e.kind == "send"]
    assert {event.route.algorithm for event in sends} == {"mailbox", "message"}
    for event in sends:
        n, channels, rows, cols = event.shape
        assert (event.route.algorithm == "mailbox") == (4 * n * channels * rows * cols <= 128)


def test_collectives_of_two_backends_in_crossed_orders_are_a_deadlock():
    a, b = joint("collective", "sum a", MPI), joint("collective", "sum b", GLOO)
    [text] = mixed([a, b], [b, a])
    assert text == (
        "deadlock: rank 0 waits for rank 1 to join sum a through mpi; "
        "rank 1 waits for rank 0 to join sum b through gloo"
    )
    assert not mixed([a, b], [a, b])
    ways = [parse_route("mpi:segmented:4MiB"), parse_route("mpi:segmented:1MiB")]
    [text] = mixed(*([joint("collective", "sum", way)] for way in ways))
    assert "by mpi:segmented:4MiB where rank 1 of the same group" in text


def test_issued_sums_of_two_backends_may_cross_but_not_their_waits_and_collectives():
    # Both are under way in queues of their own, so each rank may wait in its own order.
    issues = joint("issue", "a", MPI, 1), joint("issue", "b", GLOO, 2)
    waits = [event._replace(kind="wait_issued") for event in issues]
    assert not mixed([*issues, *waits], [*issues[::-1], *waits[::-1]])
    # In one backend the same orders are two different sums that meet.
    same = [event._replace(route=GLOO) for event in issues]
    ends = [event._replace(route=GLOO) for event in waits]
    assert "rank 0 calls a" in mixed([*same, *ends], [*same[::-1], *ends])[0]
    # Rank 0 waits for the mpi sum first, which rank 1 begins behind its blocking gloo sum.
    a, b = issues[0], joint("collective", "b", GLOO)
    assert not mixed([a, b, waits[0]], [b, a, waits[0]])
    [text] = mixed([a, waits[0], b], [b, a, waits[0]])
    assert "rank 0 waits for rank 1 to join a through mpi" in text
    assert "rank 1 waits for rank 0 to join b through gloo" in text


def test_messages_of_two_backends_do_not_see_each_other():
    send, recv = message("send", 1, "x", MPI), message("recv", 0, "x", MPI)
    ends = send._replace(kind="wait_send"), recv._replace(kind="wait_recv")
    both = joint("collective", "sum", GLOO)
    assert not mixed([send, both, ends[0]], [both, recv, ends[1]])
    [text] = mixed([send, ends[0], both], [both, recv, ends[1]])
    assert "rank 0 waits for rank 1 to receive x" in text
    # One tag means a message within its backend.
    sends = message("send", 1, "x", GLOO), message("send", 1, "y", MPI)
    receives = message("recv", 0, "y", MPI), message("recv", 0, "x", GLOO)
    assert not mixed([*sends, SENT], [*receives, *(e._replace(kind="wait_recv") for e in receives)])
    recv = message("recv", 0, "x", GLOO)
    texts = mixed([send], [recv, recv._replace(kind="wait_recv")])
    assert "rank 0 sends x through mpi to rank 1, which never receives it" in texts
    assert "rank 1 expects x through gloo from rank 0, which never sends it" in texts


def test_stream_or_mailbox_holds_up_its_own_messages_alone():
    a, b = message("send", 1, "a", GLOO, 1), message("send", 1, "b", NCCL, 2)
    assert not mixed([a, b, SENT], received([b, a]))
    mails = [message("send", 1, f"mail {n}", SHM, n, lane=3) for n in range(3)]
    both = joint("collective", "sum", MPI)
    assert not mixed([*mails[:2], both, mails[2]], [both, *received(mails)])
    [text] = mixed([*mails, both], [both, *received(mails)])
    assert "to make room for mail 2" in text
