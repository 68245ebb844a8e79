"""The abstract machine under each semantics: streams, mailboxes, and several backends at once."""

from __future__ import annotations

import pytest

from hires.core.ranks import mailbox_limits
from hires.plan.event import WORLD, Event
from hires.plan.plan import Finding
from hires.plan.program import AHEAD, JOINED, events
from hires.plan.proof.common_order import SEMANTICS, prove_in_order
from hires.plan.proof.prove import judged, run_machine, verify
from hires.plan.proof.semantics import MAILBOXES, RENDEZVOUS, ROUTES, SEPARATE, STREAMS
from hires.plan.routes import parse_route
from tests.helpers.damage import prove
from tests.helpers.small_plans import LAYOUTS, plan_of

PIPELINES = ("lp", "pp 1f1b", "sp+pp 1f1b", "sp in every stage")
SENT = Event("wait_sends", -1, 0)


def problems(*programs: list[Event], semantics: str = STREAMS) -> list[str]:
    """Returns the machine's problems, if a proof by a common order does not contradict them."""
    members = [[*range(len(programs))]]
    texts = run_machine([*map(list, programs)], members, semantics).problems
    in_order = prove_in_order([*map(iter, programs)], members) if semantics in SEMANTICS else None
    assert in_order is None or not texts
    return texts


def post(kind: str, peer: int, what: str, call: int = 0, tag: int = 0) -> Event:
    return Event(kind, peer, tag, (4,), "float32", what, call=call)


def got(peer: int, what: str, tag: int = 0) -> Event:
    return Event("wait_recv", peer, tag, what=what)


def test_crossed_posts_progress_together_in_one_call_only():
    def exchange(peer: int, mine: str, theirs: str, call: int) -> list[Event]:
        posts = [post("recv", peer, theirs, call), post("send", peer, mine, call)]
        return [*posts, got(peer, theirs), SENT]

    assert problems(exchange(1, "a", "b", 7), exchange(0, "b", "a", 9)) == []
    assert problems(exchange(1, "a", "b", 0), exchange(0, "b", "a", 0)) == [
        "deadlock: the stream of rank 0 must first receive b from rank 1; "
        "the stream of rank 1 must first receive a from rank 0"
    ]


def test_streams_of_different_peers_do_not_hold_up_each_other():
    # The receive from rank 2 comes late; the message from rank 1 passes it.
    late = [post("recv", 1, "go"), got(1, "go"), post("send", 0, "x"), SENT]
    first = [post("recv", 2, "x"), post("recv", 1, "y"), got(1, "y"), got(2, "x")]
    assert problems(first, [post("send", 0, "y"), post("send", 2, "go"), SENT], late) == []
    # The send to rank 1 is over although the receive from rank 2, of the same call, is not.
    both = [post("send", 1, "a", 1), post("recv", 2, "c", 1)]
    first = [*both, Event("wait_send", 1, 0), got(2, "c")]
    second = [post("recv", 0, "a"), got(0, "a"), post("send", 2, "b"), SENT]
    third = [post("recv", 1, "b"), got(1, "b"), post("send", 0, "c"), SENT]
    assert problems(first, second, third) == []


def test_stream_has_no_tags():
    sends = [post("send", 1, "a", tag=1), post("send", 1, "b", tag=2), SENT]
    receives = [post("recv", 0, "b", tag=2), post("recv", 0, "a", tag=1), got(0, "a", 1)]
    receives.append(got(0, "b", 2))
    assert problems(sends, receives, semantics=RENDEZVOUS) == []
    assert problems(sends, receives) == [
        "rank 0 sends a as [4] float32 where rank 1 expects b as [4] float32",
        "rank 0 sends b as [4] float32 where rank 1 expects a as [4] float32",
    ]
    # Kinds of messages have streams of their own where these are separate.
    value, halo = post("recv", 1, "value"), post("recv", 1, "halo", tag=1)._replace(lane=2)
    first = [value, halo, got(1, "halo", 1)._replace(lane=2), got(1, "value")]
    second = [e._replace(kind="send", peer=0) for e in (halo, value)]
    assert problems(first, [*second, SENT], semantics=SEPARATE) == []
    assert problems(first, [*second, SENT])[0].startswith("rank 1 sends halo as ")


@pytest.mark.parametrize("name", PIPELINES)
def test_order_of_receives_decides_on_pair_streams(name):
    plan = plan_of(**LAYOUTS[name])
    assert not prove(plan, STREAMS, JOINED).problems
    # Safe with gloo. On a stream, the gradient that is expected stands before the value that the
    # other side needs to compute it.
    [cycle] = prove(plan, STREAMS, AHEAD).problems
    assert cycle.startswith("deadlock: the stream of rank ")
    assert " must first receive the gradient of " in cycle


def test_backend_decides_which_verdict_is_an_error():
    plan = plan_of(**LAYOUTS["pp"])
    verdicts = [*judged(plan)]
    assert [(v.semantics, v.order, not v.proof.problems) for v in verdicts] == [
        ("routes", "ahead", True),
        ("rendezvous", "ahead", True),
        ("mailboxes", "ahead", True),
        ("separate streams", "ahead", True),
        ("pair streams", "joined", True),
        ("pair streams", "ahead", False),
    ]
    assert [v.to_dict(plan)["decides"] for v in verdicts] == [True] * 2 + [False] * 4
    assert verify(plan) == []
    # A rank that takes the microbatches in another order mixes them up only where tags are unknown.
    plan.schedule[0] = [plan.schedule[0][i] for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    [note] = verify(plan)
    assert (note.severity, note.key) == ("note", "comm.backend")
    assert note.text.startswith("nccl could not run it: rank 0 sends ")
    plan.backend = "nccl"
    text = note.text.removeprefix("nccl could not run it: ")
    assert verify(plan)[0] == Finding("error", "parallel", text)


NUMBERS = range(1, mailbox_limits.SLOTS + 2)
"""One halo more than a mailbox has places."""


def halo(kind: str, peer: int, number: int, mail: bool = True, lane: int = 1) -> Event:
    return Event(kind, peer, number, (4,), "float32", f"halo {number}", lane, mail)


def all_of(kind: str, peer: int, **facts) -> list[Event]:
    return [halo(kind, peer, number, **facts) for number in NUMBERS]


def test_full_mailbox_waits_for_its_reader():
    programs = [
        [*all_of("recv", peer), *all_of("send", peer), *all_of("wait_recv", peer)]
        for peer in (1, 0)
    ]
    assert problems(*programs, semantics=RENDEZVOUS) == []
    assert problems(*programs, semantics=MAILBOXES) == [
        "deadlock: rank 0 waits for rank 1 to read older messages, to make room for halo 3; "
        "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
    ]
    # Those of the one direction lie unread while those of the other are read.
    sends, up = all_of("send", 1), all_of("send", 1, lane=2)
    reads = [*all_of("recv", 0), *all_of("recv", 0, lane=2)]
    reads += [*all_of("wait_recv", 0, lane=2), *all_of("wait_recv", 0)]
    assert problems([*sends[:-1], *up, sends[-1]], reads, semantics=MAILBOXES) == []


def test_mailbox_is_read_in_the_order_in_which_it_was_written():
    first = [halo("send", 1, 1), halo("send", 1, 2)]
    second = [halo(kind, 0, number) for kind in ("recv", "wait_recv") for number in (2, 1)]
    assert problems(first, second, semantics=RENDEZVOUS) == []
    text = problems(first, second, semantics=MAILBOXES)[0]
    assert text.startswith("rank 0 sends halo 1 as [4] float32 where rank 1 expects halo 2 as ")
    second = [halo("recv", 0, n) for n in (1, 2)] + [halo("wait_recv", 0, n) for n in (2, 1)]
    proof = run_machine([first, second], [], MAILBOXES)
    assert proof.stuck == [1]
    assert proof.problems == [
        "rank 1 waits for halo 2 from rank 0 before halo 1, which lies first in its mailbox"
    ]


@pytest.mark.parametrize("large", [True, False])
def test_large_halo_that_is_sent_can_block_small_ones_that_are_not(large):
    # The first rank waits until its large halo is taken, the second for room: each way alone is
    # safe, both together are not. So the proof must know which halo goes which way.
    big = [halo(kind, 1, 9, mail=not large) for kind in ("send", "wait_send")]
    first = [*all_of("recv", 1), *big, *all_of("wait_recv", 1)]
    taken = [halo(kind, 0, 9, mail=not large) for kind in ("recv", "wait_recv")]
    second = [*all_of("send", 0), *taken]
    assert problems(first, second, semantics=RENDEZVOUS) == []
    blocked = (
        "deadlock: rank 0 waits for rank 1 to receive halo 9; "
        "rank 1 waits for rank 0 to read older messages, to make room for halo 3"
    )
    assert problems(first, second, semantics=MAILBOXES) == ([blocked] if large else [])


def test_size_decides_which_halos_are_mailed(monkeypatch):
    plan = plan_of(**LAYOUTS["sp grid"])
    assert all(event.mail for event in events(plan, 0) if event.kind == "send")
    assert not any(event.mail for event in events(plan_of(**LAYOUTS["pp"]), 0))
    monkeypatch.setattr(mailbox_limits, "MAIL_BYTES", 128)
    sends = [event for event in events(plan, 0) if event.kind == "send"]
    assert {event.mail for event in sends} == {True, False}
    for event in sends:
        n, channels, rows, cols = event.shape
        assert event.mail == (4 * n * channels * rows * cols <= 128)


GLOO, MPI, NCCL, SHM = map(parse_route, ("gloo", "mpi", "nccl:channel", "shm:mailbox"))


def joint(kind, what, route, tag=0):
    return Event(kind, WORLD, tag, (4,), "float32", what, route=route)


def message(kind, peer, what, route, tag=0, **more):
    return Event(kind, peer, tag, (4,), "float32", what, route=route, **more)


def mixed(*programs):
    return problems(*programs, semantics=ROUTES)


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
    def crossed(first, second):
        a, b = message("send", 1, "a", first, 1), message("send", 1, "b", second, 2)
        there = [e._replace(kind="recv", peer=0) for e in (b, a)]
        waits = [e._replace(kind="wait_recv") for e in there]
        return mixed([a, b, SENT], [*there, *waits])

    assert not crossed(GLOO, NCCL)
    # A stream has no tags: the first send meets the first receive.
    assert crossed(NCCL, NCCL)[0].startswith("rank 0 sends a as [4] float32 where rank 1 expects b")
    mails = [message("send", 1, f"mail {n}", SHM, n, mail=True, lane=3) for n in range(3)]
    both = joint("collective", "sum", MPI)
    reads = [e._replace(kind="recv", peer=0) for e in mails]
    waits = [e._replace(kind="wait_recv") for e in reads]
    assert not mixed([*mails[:2], both, mails[2]], [both, *reads, *waits])
    [text] = mixed([*mails, both], [both, *reads, *waits])
    assert "to make room for mail 2" in text
