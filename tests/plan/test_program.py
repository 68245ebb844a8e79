"""One rank's list of communications, written out."""

from __future__ import annotations

from hires.plan.plan import Plan
from hires.plan.program import events
from tests.helpers.small_plans import plan_of


def lines(plan: Plan, rank: int) -> list[str]:
    """The program of a rank in words."""
    return [
        f"{event.kind} {event.what}" + (f" / {event.peer}" if event.kind != "wait_sends" else "")
        for event in events(plan, rank)
    ]


def test_receives_are_posted_one_action_ahead_and_sends_are_waited_for_at_the_end():
    plan = plan_of(stages=2, microbatches=2, balance=[6, 1])
    assert lines(plan, 0) == [
        "send mean_1 in F0 / 1",
        "recv the gradient of mean_1 in B0 / 1",  # before F1, which comes first
        "send mean_1 in F1 / 1",
        "recv the gradient of mean_1 in B1 / 1",
        "wait_recv the gradient of mean_1 in B0 / 1",
        "wait_recv the gradient of mean_1 in B1 / 1",
        "wait_sends its sends",
    ]
    assert lines(plan, 1) == [
        "recv mean_1 in F0 / 0",
        "recv mean_1 in F1 / 0",
        "wait_recv mean_1 in F0 / 0",
        "wait_recv mean_1 in F1 / 0",
        "send the gradient of mean_1 in B0 / 0",
        "send the gradient of mean_1 in B1 / 0",
        "wait_sends its sends",
    ]


def test_halo_waits_for_its_own_messages_before_anything_else_happens():
    # The engine waits for the sends of a halo too; the proof left that out.
    program = lines(plan_of("infer", tiles=[1, 2]), 1)
    assert program[:4] == [
        "recv the halo of conv1 in F0 / 0",
        "send the halo of conv1 in F0 / 0",
        "wait_recv the halo of conv1 in F0 / 0",
        "wait_send the halo of conv1 in F0 / 0",
    ]


def test_backward_pass_meets_the_tiles_in_the_opposite_order():
    program = lines(plan_of(tiles=[2, 1]), 0)
    norms = [line.split(" / ")[0] for line in program if " norm of " in line]
    assert norms == [
        f"collective norm of {name}"
        for name in ("bn1 in F0", "bn3 in F0", "bn3 in B0", "bn1 in B0")
    ]


def test_gradients_are_summed_last_and_only_where_somebody_else_holds_the_stage():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=1)
    assert lines(plan, 0)[-2:] == ["wait_sends its sends", "collective gradients of stage 0 / 2"]
    assert lines(plan, 2)[-1] == "wait_sends its sends"
    assert lines(plan_of("infer", tiles=[2, 1]), 0)[-1] == "wait_sends its sends"


def test_replicas_run_the_same_program_shifted_by_their_ranks():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=2, microbatches=2)
    one, other = (
        [e for e in events(plan, rank) if e.kind in ("send", "recv", "wait_recv", "wait_send")]
        for rank in (0, 3)
    )
    assert [event._replace(peer=event.peer + 3) for event in one] == other
