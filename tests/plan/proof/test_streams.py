"""The abstract machine with streams: what two ranks post runs in order, as with nccl."""

from __future__ import annotations

import gc
import random

import pytest

from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Finding
from hires.plan.program import AHEAD, JOINED, events
from hires.plan.proof.prove import creation, judged, run_machine, verify
from hires.plan.proof.semantics import MAILBOXES, RENDEZVOUS, SEPARATE, STREAMS
from tests.helpers.damage import prove
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import LAYOUTS, plan_of

PIPELINES = ("lp", "pp", "pp 1f1b", "sp+lp", "sp+pp", "sp+pp 1f1b", "sp in every stage")


def post(kind: str, peer: int, what: str, call: int = 0, tag: int = 0) -> Event:
    return Event(kind, peer, tag, (4,), "float32", what, call=call)


def got(peer: int, what: str, tag: int = 0) -> Event:
    return Event("wait_recv", peer, tag, what=what)


SENT = Event("wait_sends", -1, 0)


def problems(*programs: list[Event]) -> list[str]:
    return run_machine(list(programs), [], STREAMS).problems


def test_crossed_posts_of_one_call_progress_together():
    def exchange(peer: int, mine: str, theirs: str, call: int) -> list[Event]:
        posts = [post("recv", peer, theirs, call), post("send", peer, mine, call)]
        return [*posts, got(peer, theirs), SENT]

    assert problems(exchange(1, "a", "b", 7), exchange(0, "b", "a", 9)) == []


def test_crossed_posts_of_two_calls_are_a_deadlock():
    first = [post("recv", 1, "b"), post("send", 1, "a"), got(1, "b"), SENT]
    second = [post("recv", 0, "a"), post("send", 0, "b"), got(0, "a"), SENT]
    assert problems(first, second) == [
        "deadlock: the stream of rank 0 must first receive b from rank 1; "
        "the stream of rank 1 must first receive a from rank 0"
    ]


def test_posts_with_a_wait_between_are_two_calls():
    first = [post("recv", 1, "b", 1), got(1, "b"), post("send", 1, "a", 1), SENT]
    second = [post("recv", 0, "a", 1), got(0, "a"), post("send", 0, "b", 1), SENT]
    assert problems(first, second) == [
        "deadlock: rank 0 waits for b from rank 1; the stream of rank 0 must first receive b from "
        "rank 1; rank 1 waits for a from rank 0; the stream of rank 1 must first receive a from "
        "rank 0"
    ]


def test_streams_of_different_peers_do_not_hold_up_each_other():
    # The receive from rank 2 comes late; the message from rank 1 passes it.
    late = [post("recv", 1, "go"), got(1, "go"), post("send", 0, "x"), SENT]
    first = [post("recv", 2, "x"), post("recv", 1, "y"), got(1, "y"), got(2, "x")]
    assert problems(first, [post("send", 0, "y"), post("send", 2, "go"), SENT], late) == []


def test_call_to_several_peers_is_a_unit_on_each_of_their_streams():
    # The send to rank 1 is over although the receive from rank 2, of the same call, is not.
    first = [
        post("send", 1, "a", 1),
        post("recv", 2, "c", 1),
        Event("wait_send", 1, 0),
        got(2, "c"),
    ]
    second = [post("recv", 0, "a"), got(0, "a"), post("send", 2, "b"), SENT]
    third = [post("recv", 1, "b"), got(1, "b"), post("send", 0, "c"), SENT]
    assert problems(first, second, third) == []


def test_wait_lasts_until_the_whole_unit_is_done():
    # Both messages to rank 1 are one kernel: the second holds up the wait for the first.
    first = [
        post("send", 1, "a", 1, tag=1),
        post("send", 1, "b", 1, tag=2),
        Event("wait_send", 1, 1),
        post("send", 1, "go", 0, tag=3),
        SENT,
    ]
    second = [post("recv", 0, "a", tag=1), got(0, "a", 1)]
    rest = [post("recv", 0, "b", tag=2), post("recv", 0, "go", tag=3), got(0, "b", 2)]
    assert problems(first, [*second, *rest, got(0, "go", 3)]) == []
    late = [post("recv", 0, "go", tag=3), post("recv", 0, "b", tag=2), got(0, "b", 2)]
    assert problems(first, [*second, *late, got(0, "go", 3)]) == [
        "rank 0 sends b as [4] float32 where rank 1 expects go as [4] float32",
        "rank 0 sends go as [4] float32 where rank 1 expects b as [4] float32",
    ]


def test_tags_do_not_let_messages_pass_each_other():
    sends = [post("send", 1, "a", tag=1), post("send", 1, "b", tag=2), SENT]
    receives = [post("recv", 0, "b", tag=2), post("recv", 0, "a", tag=1), got(0, "a", 1)]
    receives.append(got(0, "b", 2))
    assert run_machine([sends, receives], []).problems == []
    assert problems(sends, receives) == [
        "rank 0 sends a as [4] float32 where rank 1 expects b as [4] float32",
        "rank 0 sends b as [4] float32 where rank 1 expects a as [4] float32",
    ]


def test_missing_message_is_named_and_not_the_one_that_it_holds_up():
    first = [post("recv", 1, "x"), post("recv", 1, "y", tag=1), got(1, "y", 1), SENT]
    second = [Event("collective", 0, 0, (1,), "float32", "sum"), post("send", 0, "y", tag=1), SENT]
    assert run_machine([first, second], [[0, 1]], STREAMS).problems == [
        "rank 0 expects x from rank 1, which never sends it",
        "rank 1 calls sum, but rank 0 of its group never does",
    ]


def test_kinds_of_messages_have_streams_of_their_own_where_they_are_separate():
    # Two tiles that are also neighbours in the other direction's pipeline.
    def stage(kind: str, peer: int) -> Event:
        return post(kind, peer, "value")

    def halo(kind: str, peer: int) -> Event:
        return post(kind, peer, "halo", tag=1)._replace(lane=2)

    first = [stage("recv", 1), halo("recv", 1), got(1, "halo", 1)._replace(lane=2), got(1, "value")]
    second = [halo("send", 0), stage("send", 0), SENT]
    assert run_machine([first, second], [], SEPARATE).problems == []
    assert problems(first, second)[0].startswith("rank 1 sends halo as ")


def test_dropped_send_and_dropped_receive_name_both_ranks():
    assert problems([post("send", 1, "a"), SENT], []) == [
        "rank 0 sends a to rank 1, which never receives it"
    ]
    assert problems([], [post("recv", 0, "a"), got(0, "a")]) == [
        "rank 1 expects a from rank 0, which never sends it"
    ]


def test_dropped_wait_is_named():
    assert problems([post("send", 1, "a"), SENT], [post("recv", 0, "a")]) == [
        "rank 1 never waits for a from rank 0"
    ]


@pytest.mark.parametrize("task", ["train", "infer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_free_of_deadlock_on_separate_streams(name, task):
    plan = plan_of(task, **LAYOUTS[name])
    for order in (AHEAD, JOINED):
        assert not prove(plan, SEPARATE, order).problems
        assert not prove(plan, RENDEZVOUS, order).problems


@pytest.mark.parametrize("name", PIPELINES)
def test_receives_that_share_a_call_with_sends_help_on_pair_streams(name):
    assert not prove(plan_of(**LAYOUTS[name]), STREAMS, JOINED).problems


def test_skips_over_stages_under_1f1b_need_separate_streams():
    # Rank 3 receives F2 in the call that sends B0, which is over when rank 0 posts the receive of
    # B0: with its send of F4, behind that of F3, which rank 3 does not receive before F2 is over.
    plan = plan_of(stages=5, microbatches=8, schedule="1f1b", balance=[1, 1, 2, 1, 2])
    assert prove(plan, STREAMS, JOINED).problems == [
        "deadlock: the stream of rank 0 must first send relu in F3 to rank 3; rank 3 waits for "
        "relu in F2 from rank 0; the stream of rank 3 must first send the gradient of relu in B0 "
        "to rank 0"
    ]
    assert not prove(plan, SEPARATE).problems


@pytest.mark.parametrize("name", PIPELINES)
def test_receives_posted_ahead_hold_up_the_sends_behind_them(name):
    # Safe with gloo. On a stream, the gradient that is expected stands before the value that the
    # other side needs to compute it.
    [cycle] = prove(plan_of(**LAYOUTS[name]), STREAMS, AHEAD).problems
    assert cycle.startswith("deadlock: the stream of rank ")
    assert " must first receive the gradient of " in cycle


@pytest.mark.parametrize("name", PIPELINES)
def test_orders_differ_in_when_receives_are_posted_and_in_nothing_else(name):
    plan = plan_of(**LAYOUTS[name])
    for rank in range(plan.world):
        ahead, joined = (
            [event._replace(call=0) for event in events(plan, rank, order)]
            for order in (AHEAD, JOINED)
        )
        assert [e for e in ahead if e.kind != "recv"] == [e for e in joined if e.kind != "recv"]
        ahead, joined = (
            [e for e in program if e.kind == "recv" and "halo" not in e.what]
            for program in (ahead, joined)
        )
        assert ahead == joined


def test_posts_between_two_computations_are_one_call():
    plan = plan_of(stages=2, microbatches=2, balance=[6, 1], schedule="1f1b")
    program = [event for event in events(plan, 0, JOINED) if event.call]
    assert [(event.call, event.kind, event.what.split()[-1]) for event in program] == [
        (2, "send", "F0"),
        (3, "send", "F1"),
        (3, "recv", "B0"),
        (4, "recv", "B1"),
    ]


def test_backend_decides_which_verdict_is_an_error():
    plan = plan_of(**LAYOUTS["pp"])
    assert verify(plan) == []
    # A rank that takes the microbatches in another order mixes them up only where tags are unknown.
    plan.schedule[0] = [plan.schedule[0][i] for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    [note] = verify(plan)
    assert (note.severity, note.key) == ("note", "comm.backend")
    assert note.text.startswith("nccl and nccl_direct could not run it: rank 0 sends ")
    assert " in F1 as " in note.text
    plan.backend = "nccl"
    assert verify(plan)[0] == Finding(
        "error", "parallel", note.text.removeprefix("nccl and nccl_direct could not run it: ")
    )


def test_verdict_is_told_for_each_semantics():
    plan = plan_of(**LAYOUTS["pp"])
    verdicts = list(judged(plan))
    assert [(v.semantics, v.order, not v.proof.problems) for v in verdicts] == [
        ("routes", "ahead", True),
        ("rendezvous", "ahead", True),
        ("mailboxes", "ahead", True),
        ("separate streams", "ahead", True),
        ("pair streams", "joined", True),
        ("pair streams", "ahead", False),
    ]
    decides = [v.to_dict(plan)["decides"] for v in verdicts]
    assert decides == [True, True, False, False, False, False]
    assert verdicts[0].text == verdicts[1].text == plan.verdict


def test_ranks_meet_to_create_every_group_of_more_than_one():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=2)
    assert [list(creation(groups(plan), rank)) for rank in (0, 2)] == [
        [
            Event("create", 0, 0, what="the creation of group 0"),  # the tiles
            Event("create", 4, 0, what="the creation of group 4"),  # the gradients
        ],
        [Event("create", 5, 0, what="the creation of group 5")],
    ]


def test_no_random_plan_can_deadlock_where_streams_are_separate():
    for seed in range(60):
        plan = random_plan(random.Random(seed))
        for semantics in (RENDEZVOUS, MAILBOXES, SEPARATE):
            assert not prove(plan, semantics).problems, seed


def test_proof_leaves_the_garbage_collector_as_it_was():
    plan = plan_of(**LAYOUTS["pp"])
    for switch in (gc.disable, gc.enable):
        switch()
        was_on = gc.isenabled()
        assert verify(plan) == []
        assert gc.isenabled() == was_on
