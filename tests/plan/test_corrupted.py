"""A plan with one communication changed is never taken for a good one."""

from __future__ import annotations

import pytest

from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import run_machine, verify
from tests.helpers.small_plans import LAYOUTS, plan_of

Programs = list[list[Event]]
MIXED = ("pp 1f1b", "sp grid", "sp+lp", "sp+pp", "sp in every stage")


def programs_of(plan: Plan) -> Programs:
    return [list(events(plan, rank)) for rank in range(plan.world)]


def changed(plan: Plan, rank: int, index: int, *events_now: Event) -> list[str]:
    """The problems after one event of a rank is replaced by others, or by none."""
    programs = programs_of(plan)
    programs[rank][index : index + 1] = events_now
    return run_machine(programs, groups(plan)).problems


def picked(plan: Plan, *kinds: str) -> list[tuple[int, int, Event]]:
    """Some events of these kinds, spread over all ranks: (rank, index, event)."""
    found = [
        (rank, index, event)
        for rank, program in enumerate(programs_of(plan))
        for index, event in enumerate(program)
        if event.kind in kinds
    ]
    return found[:: max(1, len(found) // 24)]


def named(problems: list[str], *ranks: int) -> bool:
    """Whether some problem names all these ranks, and what they were to exchange."""
    return any(all(f"rank {rank}" in text for rank in ranks) for text in problems)


@pytest.mark.parametrize("name", MIXED)
def test_dropped_message_names_both_ranks(name):
    plan = plan_of(**LAYOUTS[name])
    for rank, index, event in picked(plan, "send", "recv"):
        assert named(changed(plan, rank, index), rank, event.peer)


@pytest.mark.parametrize("name", MIXED)
def test_dropped_wait_names_both_ranks(name):
    plan = plan_of(**LAYOUTS[name])
    for rank, index, event in picked(plan, "wait_recv"):
        assert named(changed(plan, rank, index), rank, event.peer)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("change", [{"shape": (1, 2, 3)}, {"dtype": "int8"}, {"tag": 10**6}])
def test_changed_shape_type_or_tag_names_both_ranks(name, change):
    plan = plan_of(**LAYOUTS[name])
    for rank, index, event in picked(plan, "send", "recv"):
        problems = changed(plan, rank, index, event._replace(**change))
        assert named(problems, rank, event.peer)


@pytest.mark.parametrize("name", ["sp grid", "sp+lp", "sp+pp"])
def test_changed_peer_names_the_old_and_the_new_one(name):
    plan = plan_of(**LAYOUTS[name])
    for rank, index, event in picked(plan, "send"):
        wrong = next(peer for peer in range(plan.world) if peer not in (rank, event.peer))
        problems = changed(plan, rank, index, event._replace(peer=wrong))
        assert named(problems, rank, wrong)
        assert named(problems, rank, event.peer)


def test_dropped_collective_names_a_rank_that_came_and_the_one_that_did_not():
    plan = plan_of(**LAYOUTS["sp+lp"])
    for rank, index, event in picked(plan, "collective"):
        others = [member for member in groups(plan)[event.peer] if member != rank]
        problems = changed(plan, rank, index)
        assert any(named(problems, rank, other) for other in others)


def test_collectives_in_another_order_name_both():
    plan = plan_of(**LAYOUTS["sp columns"])
    program = programs_of(plan)[1]
    norms = [i for i, e in enumerate(program) if e.what.startswith("norm") and "F0" in e.what]
    first, second = norms[:2]
    programs = programs_of(plan)
    programs[1][first], programs[1][second] = program[second], program[first]
    problem = run_machine(programs, groups(plan)).problems[0]
    assert "of the same group calls" in problem
    assert named([problem], 0, 1)
    assert "norm of bn1 in F0" in problem
    assert "norm of bn3 in F0" in problem


def test_microbatches_sent_in_the_wrong_order_are_found_where_tags_are_equal():
    # Halos of one node have one tag in all microbatches: their order is what tells them apart.
    plan = plan_of(**LAYOUTS["sp columns"])
    programs = programs_of(plan)
    halos = [i for i, e in enumerate(programs[0]) if e.kind == "send" and "halo of conv1" in e.what]
    one, other = halos[0], halos[1]
    programs[0][one], programs[0][other] = programs[0][other], programs[0][one]
    problem = run_machine(programs, groups(plan)).problems[0]
    assert problem.startswith("rank 0 sends the halo of conv1 in F1 as ")
    assert "where rank 1 expects the halo of conv1 in F0" in problem


def test_schedules_that_wait_for_each_other_are_an_error_with_the_cycle():
    plan = plan_of(**LAYOUTS["pp 1f1b"])
    plan.schedule[1] = ["B0", *[action for action in plan.schedule[1] if action != "B0"]]
    [*findings] = verify(plan)
    assert findings[0].severity == "error"
    assert findings[0].text.startswith("deadlock: rank ")
    assert "in B0 from rank 2; rank 2 waits for " in findings[0].text
    assert plan.verdict == f"{len(findings)} problem{'s' if len(findings) > 1 else ''}"


def test_sending_before_receives_are_posted_is_a_deadlock():
    # What the receives posted one action ahead are for: each side sends first, and waits.
    plan = plan_of(**LAYOUTS["pp 1f1b"])
    programs = programs_of(plan)
    blocking = [[e for event in program for e in _at_once(event, program)] for program in programs]
    assert not run_machine(programs, groups(plan)).problems
    assert run_machine(blocking, groups(plan)).problems[0].startswith("deadlock: rank ")


def _at_once(event: Event, program: list[Event]) -> list[Event]:
    """Posts a receive only when it is waited for, and waits for a send at once."""
    if event.kind == "recv":
        return []
    if event.kind == "send":
        return [event, event._replace(kind="wait_send")]
    if event.kind == "wait_recv":
        same = (event.peer, event.tag)
        posted = next(e for e in program if e.kind == "recv" and (e.peer, e.tag) == same)
        return [posted, event]
    return [event]
