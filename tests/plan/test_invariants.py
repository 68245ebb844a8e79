"""Every layout and random layouts: proof, message counts, traffic, ownership, routes, files.

Each layout is planned once for a task and a number of replicas, and all tests read that plan.
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction

import pytest

from hires.core.schedules import started
from hires.plan import traffic
from hires.plan.event import ALONE, BARRIER, POSTS, Event
from hires.plan.groups import gradient_group, groups, tile_group
from hires.plan.layout import held_by
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.prove import prove_each
from hires.plan.rules import TILED
from hires.plan.simulation.costs import COMPUTES
from hires.plan.simulation.simulate import simulate
from tests.helpers.damage import prove
from tests.helpers.random_plans import random_plan
from tests.helpers.simulated import EqualCosts
from tests.helpers.small_plans import LAYOUTS, by_kind, plan_of

layouts = pytest.mark.parametrize("name", LAYOUTS)

COUNTS = {
    "single": (0, 0, 0),
    "dp": (0, 1, 8424),
    "lp": (4, 0, 66816),
    "pp": (16, 0, 66816),
    "pp 1f1b": (24, 0, 100096),
    "sp rows": (32, 8, 67024),
    "sp columns": (32, 15, 40744),
    "sp grid": (172, 8, 147400),
    "sp with empty tiles": (84, 8, 205680),
    "sp+lp": (80, 7, 123968),
    "sp+pp": (88, 26, 120832),
    "sp+pp 1f1b": (416, 27, 204096),
    "sp in every stage": (48, 17, 107816),
    "two grids": (170, 16, 141536),
    "local_dp": (24, 10, 89336),
    "gems": (16, 2, 72904),
    "gems_1f1b": (24, 4, 108520),
    "sp+gems": (36, 15, 101480),
    "sp+gems on shared ranks": (198, 16, 102280),
    "sp+pp+gems with local_dp": (80, 17, 131512),
}
"""Messages, collectives and bytes of a training step of one replica."""


@functools.cache
def planned(name: str, task: str = "train", replicas: int = 1) -> Plan:
    plan = plan_of(
        task, **{**LAYOUTS[name], "replicas": replicas * LAYOUTS[name].get("replicas", 1)}
    )
    assert plan.ok, plan.findings
    return plan


def plans_of(name: str) -> Iterator[Plan]:
    """Yields the plans of a layout for both tasks, and for one and two replicas."""
    for task in ("train", "infer"):
        for replicas in (1, 2):
            yield planned(name, task, replicas)


def programs_of(plan: Plan) -> list[list[Event]]:
    return [[*events(plan, rank)] for rank in range(plan.world)]


def counts_of(plan: Plan) -> tuple[int, int]:
    """Returns messages and collectives that the programs of all ranks hold."""
    sizes = [*map(len, groups(plan)), plan.world]
    every = [event for program in programs_of(plan) for event in program if event.counts]
    shares = [Fraction(1, sizes[e.peer]) for e in every if e.operation not in POSTS]
    return sum(event.operation == "send" for event in every), int(sum(shares))


@layouts
def test_world_is_deadlock_free_and_its_messages_are_counted(name):
    for plan in plans_of(name):
        assert not prove_each(programs_of(plan), groups(plan))
        # The verdict is that on the first replica, which stands for the others.
        messages, collectives = counts_of(plan)
        assert plan.verdict == (
            f"deadlock-free, {messages} messages and {collectives} collectives a step"
        )
    plan = planned(name)
    assert (*counts_of(plan), plan.totals["bytes"]) == COUNTS[name]
    for task, backend in itertools.product(("train", "infer"), ("gloo", "nccl")):
        assert not prove(planned(name, task), backend)


def test_4096_ranks_are_proved_and_each_holds_one_stage():
    for layout in ({"tiles": [2, 2]}, {"stages": 4, "schedule": "1f1b"}):
        plan = plan_of(batch=1024, **layout, replicas=1024)
        assert plan.world == 4096
        assert plan.verdict.startswith("deadlock-free")
        every = groups(plan)
        holders = [every[gradient_group(plan, stage)] for stage in range(len(plan.stages))]
        assert sorted(itertools.chain(*holders)) == [*range(4096)]


def check_traffic(plan: Plan) -> None:
    """Compares totals, and who sends how much to whom, with the calls of all ranks."""
    matrix = [[0.0] * plan.world for _ in range(plan.world)]
    counted: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    everyone = [*range(plan.world)]
    for rank, program in enumerate(programs_of(plan)):
        for event in program:
            if not event.counts or event.operation == "recv":
                continue
            pair = event.kind == "send"
            ranks = [rank, event.peer] if pair else everyone
            if event.kind in ("collective", "issue"):
                ranks = groups(plan)[event.peer]
            each = event.num_bytes * (2 / len(ranks) if event.operation == "all_reduce" else 1)
            for target in ranks:
                matrix[rank][target] += each if target != rank else 0
            counted[event.traffic][0] += 1
            counted[event.traffic][1] += each * (len(ranks) - 1)
    totals = by_kind(plan)
    assert {kind: count for kind, (count, _) in counted.items()} == {
        kind: messages for kind, (messages, _) in totals.items()
    }
    for kind, (_, sent) in counted.items():
        assert sent == pytest.approx(totals[kind][1], abs=2 * plan.world)
    for name, own in zip(("messages", "bytes"), zip(*totals.values(), strict=True), strict=False):
        assert plan.totals[name] == sum(own)
    for row, expected in zip(traffic.matrix(plan), matrix, strict=True):
        assert row == pytest.approx(expected, abs=64)  # shares of an all-reduce are rounded


@layouts
def test_traffic_is_that_of_the_calls_of_all_ranks(name):
    for plan in plans_of(name):
        check_traffic(plan)


def check_routes(plan: Plan) -> list[tuple[int, Event]]:
    """Checks that both sides of a message have its route; returns the events that have one."""
    routed = [
        (rank, event)
        for rank, program in enumerate(programs_of(plan))
        for event in program
        if event.traffic
    ]
    sides: dict[tuple[object, ...], object] = {}
    for rank, event in routed:
        assert event.route is not None or plan.world == 1, event
        ends: tuple[int, ...] = (event.peer,)
        if event.kind in POSTS:
            ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
        assert sides.setdefault((*ends, event.tag, event.what), event.route) == event.route
    used = {str(event.route) for _, event in routed if event.counts}
    assert {row["route"] for row in plan.totals["by_route"]} == used
    return routed


@layouts
def test_routes_agree_and_survive_the_file_of_the_plan(name):
    for plan in plans_of(name):
        routed = check_routes(plan)
        again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again.to_dict() == plan.to_dict()
        assert check_routes(again) == routed
        # Derived tables name objects of this process; a pickle that held them named none of it.
        pickled = pickle.loads(pickle.dumps(plan))
        assert programs_of(pickled) == programs_of(plan)


@layouts
def test_every_rank_layer_and_pixel_has_one_owner(name):
    for plan in plans_of(name):
        for direction in range(plan.num_directions):
            slots = [plan.slot_of(rank, direction) for rank in range(plan.world)]
            assert len(set(slots)) == plan.world
            assert [plan.rank_of(*slot) for slot in slots] == [*range(plan.world)]
            for rank, slot in enumerate(slots):
                assert rank in groups(plan)[tile_group(plan, rank, direction)]
                assert rank in groups(plan)[gradient_group(plan, slot.stage)]
        assert [n for s in plan.stages for n in plan.nodes(s.index)] == plan.graph.nodes
        assert sum(stage.num_layers for stage in plan.stages) == 7
        assert all(stage.num_layers for stage in plan.stages)
        for stage in plan.stages:
            for value, layout in stage.layout.items():
                if layout != TILED or value in stage.factors:
                    continue
                held = Counter(
                    pixel
                    for box in held_by(plan.graph, stage, value)
                    for pixel in itertools.product(range(*box.rect[:2]), range(*box.rect[2:]))
                )
                rows, cols = plan.graph.shape(value)[2:]
                assert len(held) == rows * cols
                assert set(held.values()) == {1}


@layouts
def test_simulated_step_has_the_events_of_the_plan_and_the_length_of_its_schedule(name):
    for task in ("train", "infer"):
        plan = planned(name, task)
        length = 1 + max(started(plan.pipeline, plan.schedule).values())
        simulated = simulate(plan, EqualCosts(plan))
        assert simulated.step_s == pytest.approx(length, rel=1e-9)
        for rank, line in enumerate(simulated.ranks):
            passes = (item.action for item, _ in line if item.event is COMPUTES)
            assert [*filter(None, dict.fromkeys(passes))] == plan.actions_of(rank)
            assert [item.event for item, _ in line if item.event.role != ALONE] == [
                e for e in events(plan, rank) if e.role != ALONE and e.kind != BARRIER
            ]


def test_random_layouts_have_the_same_properties():
    for seed in range(25):
        plan = random_plan(random.Random(seed))
        for backend in ("", "gloo", "nccl"):
            assert not prove(plan, backend), seed
        check_traffic(plan)
        check_routes(plan)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).to_dict() == plan.to_dict()
