"""One rank's list of communications, written out."""

from __future__ import annotations

import pytest

from hires.nets.trace import trace
from hires.plan import gradient_sums
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from tests.helpers.custom_nets import scaled
from tests.helpers.small_plans import config_of, plan_of


def lines(plan: Plan, rank: int) -> list[str]:
    """The program of a rank in words; of what concerns no other rank only the kind and action."""
    return [
        f"{event.kind} {event.part.action}".rstrip()
        if event.peer < 0
        else f"{event.kind} {event.what} / {event.peer}"
        for event in events(plan, rank)
    ]


def test_receives_are_posted_one_action_ahead_and_sends_are_waited_for_at_the_end():
    plan = plan_of(stages=2, microbatches=2, balance=[6, 1])
    assert lines(plan, 0) == [
        "barrier",
        "begin",
        "read F0",
        "forward F0",
        "send mean_1 in F0 / 1",
        "end F0",
        "recv the gradient of mean_1 in B0 / 1",  # before F1, which comes first
        "read F1",
        "forward F1",
        "send mean_1 in F1 / 1",
        "end F1",
        "recv the gradient of mean_1 in B1 / 1",
        "wait_recv the gradient of mean_1 in B0 / 1",
        "backward B0",
        "end B0",
        "wait_recv the gradient of mean_1 in B1 / 1",
        "backward B1",
        "end B1",
        "wait_sends",
        "statistics",
        "optimise",
    ]
    assert [line for line in lines(plan, 1) if " / " in line or "read" in line] == [
        "recv mean_1 in F0 / 0",
        "recv mean_1 in F1 / 0",
        "wait_recv mean_1 in F0 / 0",
        "read F0",  # the targets
        "wait_recv mean_1 in F1 / 0",
        "read F1",
        "send the gradient of mean_1 in B0 / 0",
        "send the gradient of mean_1 in B1 / 0",
    ]


def test_halo_waits_for_its_own_messages_before_anything_else_happens():
    # The engine waits for the sends of a halo too; the proof left that out.
    program = lines(plan_of("infer", tiles=[1, 2]), 1)
    assert program[3:7] == [
        "recv the halo of relu in F0 / 0",
        "send the halo of relu in F0 / 0",
        "wait_recv the halo of relu in F0 / 0",
        "wait_send the halo of relu in F0 / 0",
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
    end = ["statistics", "optimise"]
    assert lines(plan, 0)[-4:] == ["wait_sends", "collective gradients of stage 0 / 2", *end]
    assert lines(plan, 2)[-3:] == ["wait_sends", *end]
    assert lines(plan_of("infer", tiles=[2, 1]), 0)[-1] == "wait_sends"


@pytest.mark.parametrize("mode", ["early", "late"])
def test_large_gradients_travel_alone_and_the_last_layer_goes_first(
    mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        gradient_sums, "ALONE_BYTES", 4 * 4 * 4 * 9
    )  # the weights of conv3 and larger
    plan = plan_of(tiles=[2, 1])
    plan.gradients = mode
    weights = {name: plan.graph.params[f"{name}.weight"] for name in ("last", "conv3", "conv2")}
    program = [*events(plan, 0)]
    issued = [event for event in program if event.kind == "issue"]
    assert [event.shape for event in issued] == [(w.num_elements,) for w in weights.values()]
    places = [program.index(event) for event in issued]
    pass_end = next(i for i, e in enumerate(program) if e.kind == "end" and e.part.action == "B0")
    assert all((place < pass_end) == (mode == "early") for place in places)
    assert program[places[-1]].part.node == ("conv2" if mode == "early" else "")
    assert [event.kind for event in program[-6:]] == [
        "collective",  # everything small
        *["wait_issued"] * 3,
        "statistics",
        "optimise",
    ]
    small = sum(p.num_elements for p in plan.graph.params.values() if p.trainable)
    assert program[-6].shape == (small - sum(w.num_elements for w in weights.values()),)


def test_sum_of_a_parameter_that_two_nodes_use_is_never_early(monkeypatch: pytest.MonkeyPatch):
    # Autograd adds to it twice where the nodes lie in two segments that are computed again.
    monkeypatch.setattr(gradient_sums, "ALONE_BYTES", 16)
    config = config_of(tiles=[2, 1])
    plan = make_plan(config, trace(scaled(), [config.batch, 3, *config.image], True))
    plan.gradients = "early"
    nodes = {one.parameters[0]: one.node for one in gradient_sums.sums_of(plan, 0) if one.alone}
    assert (nodes["norm.weight"], nodes["conv1.weight"]) == ("", "conv1")


def test_replicas_run_the_same_program_shifted_by_their_ranks():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=2, microbatches=2)
    one, other = (
        [e for e in events(plan, rank) if e.kind in ("send", "recv", "wait_recv", "wait_send")]
        for rank in (0, 3)
    )
    # Three channels a replica: the halos, and both ways between the stages.
    shifted = [event._replace(peer=event.peer + 3, channel=event.channel + 3) for event in one]
    assert shifted == other
