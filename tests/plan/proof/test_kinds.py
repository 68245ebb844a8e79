"""A plan that is proved by kinds of ranks is proved with each rank for itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from hires.core.config.run_config import from_dict
from hires.nets.trace import trace
from hires.plan.event import Event
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events
from hires.plan.prove import prove_each
from hires.plan.rank_kinds import equal_programs
from hires.plan.step_order import prove_merged
from tests.helpers.damage import damage, through, valid_programs
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import Forked, plan_of
from tests.helpers.threaded import Programs


def inner_plan() -> Plan:
    """Returns a plan of which four tiles have eight neighbours, and none is empty."""
    config = from_dict({"image": [64, 64], "batch": 2, "parallel": {"tiles": [4, 4]}})
    return make_plan(config, trace(Forked(), [2, 3, 64, 64], training=True))


GRIDS: dict[str, Callable[[], Plan]] = {
    "column": lambda: plan_of(tiles=[3, 1]),
    "uneven": lambda: plan_of(tiles=[2, 3]),
    "microbatches": lambda: plan_of(tiles=[2, 2], microbatches=2),
    "empty tiles": lambda: plan_of(tiles=[7, 1]),
    "eight neighbours": inner_plan,
    "replicas": lambda: plan_of(tiles=[2, 2], replicas=2),
}


def in_order(programs: Programs, members: list[list[int]], *kinds: list[int]) -> bool:
    """Whether programs that are lists have a common order."""
    return prove_merged([iter(program) for program in programs], members, *kinds)


@pytest.mark.parametrize("kind", ["grid", "random"])
def test_damaged_plan_is_proved_only_if_each_rank_alone_is(kind):
    seen: Counter[tuple[bool, bool]] = Counter()
    grids = [valid_programs(GRIDS[name]()) for name in ("column", "uneven", "microbatches")]
    for seed in range(40):
        rng = random.Random(seed)
        programs, members = (
            rng.choice(grids) if kind == "grid" else valid_programs(random_plan(rng))
        )
        programs = [[*program] for program in programs]
        done = damage(rng, programs, members) if rng.random() < 0.8 else None
        for backend in ("", "gloo", "nccl"):
            moved = [through(program, backend) for program in programs]
            is_proved = in_order(moved, members)
            assert not (is_proved and prove_each(moved, members))
            seen[done is not None, is_proved] += 1
    assert seen[True, False] > 36
    assert seen[False, True] > 6


def test_messages_of_two_backends_are_no_pair():
    programs, members = valid_programs(plan_of(tiles=[2, 1]))
    assert "shm" in {event.route.backend for event in programs[0] if event.route}
    changed = [programs[0], through(programs[1], "gloo")]
    assert not in_order(changed, members)
    assert prove_each(changed, members)


def test_kinds_of_tiles_stand_for_equal_programs():
    """Every rank's program is that of its kind, with all peers shifted as the rank is."""
    layouts = [{"tiles": [5, 4]}, {"tiles": [7, 1]}, {"tiles": [3, 3], "microbatches": 2}]
    for plan in [inner_plan(), *(plan_of(**layout) for layout in layouts)]:
        kinds = equal_programs(plan)
        for rank, kind in enumerate(kinds):
            assert shifted(plan, rank) == shifted(plan, kind)
        programs, members = valid_programs(plan)
        assert in_order(programs, members, kinds)
        assert in_order(programs, members)
    assert len(set(equal_programs(inner_plan()))) == 9


def shifted(plan: Plan, rank: int) -> list[Event]:
    """Returns the program of a rank with the distances of peers in place of their numbers."""
    posts = ("send", "recv", "wait_send", "wait_recv")
    return [
        event._replace(peer=event.peer - rank if event.kind in posts else event.peer, box=())
        for event in events(plan, rank)
    ]
