"""Tests of the messages of a plan: in all, by size, and from rank to rank."""

from __future__ import annotations

import bisect
import random
from dataclasses import replace

import pytest

from hires.core.units import MIB
from hires.plan import traffic
from hires.plan.groups import groups
from hires.plan.program import events
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import LAYOUTS, plan_of


def near(plan):
    # An all-reduce rounds each rank's share down.
    total = sum(map(sum, traffic.matrix(plan)))
    return abs(total - plan.totals["bytes"]) <= 64 * plan.world**2


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("task", ["train", "infer"])
def test_matrix_holds_the_bytes_of_the_totals(name, task):
    assert near(plan_of(task, **LAYOUTS[name]))


def test_matrix_of_random_plans_holds_the_bytes_of_the_totals():
    rng = random.Random(5)
    assert all(near(random_plan(rng)) for _ in range(40))


def test_one_rank_says_nothing_and_nobody_writes_to_himself():
    assert traffic.by_class(plan_of()) == {}
    found = traffic.matrix(plan_of(**LAYOUTS["sp+gems"]))
    assert all(row[rank] == 0 for rank, row in enumerate(found))


def test_message_of_a_bound_belongs_to_the_class_above():
    sizes = [0, 1023, 1024, 16 * 1024, 256 * 1024, 4 * MIB - 1, 4 * MIB]
    assert [bisect.bisect(traffic.BOUNDS, n) for n in sizes] == [0, 0, 1, 2, 3, 3, 4]


def test_ranks_sum_in_single_precision_what_they_compute_in_half():
    plan = replace(plan_of("train", tiles=[2, 1]), dtype="bfloat16")
    dtypes = {(event.kind, event.dtype) for event in events(plan, 0)}
    assert {("collective", "float32"), ("send", "bfloat16")} <= dtypes
    assert ("collective", "bfloat16") not in dtypes


@pytest.mark.parametrize("task", ["train", "infer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_of_all_ranks_are_the_messages_of_the_totals(name, task):
    plan = plan_of(task, **LAYOUTS[name])
    by_kind: dict[str, list[float]] = {}
    for rank in range(plan.world):
        program = [*events(plan, rank)]
        for event, one in zip(program, traffic.operations(plan, rank, program), strict=True):
            if one is None or one.operation == "recv" or one.kind == "barrier":
                continue
            size = plan.world if event.kind == "agree" else 1
            if event.kind in ("collective", "issue"):
                size = len(groups(plan)[event.peer])
            sent = {"send": 1, "all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}
            kind = by_kind.setdefault(one.kind, [0, 0])
            kind[0] += 1
            kind[1] += sent[one.operation] * one.num_bytes
    totals = traffic.totals(plan)["by_kind"]
    assert {kind: n for kind, (n, _) in by_kind.items()} == {
        kind: entry["messages"] for kind, entry in totals.items()
    }
    for kind, (_, num_bytes) in by_kind.items():
        assert num_bytes == pytest.approx(totals[kind]["bytes"], abs=2 * plan.world)
