"""Is the traffic of a plan that which the planner counts, and does it go from rank to rank?"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hires.core.units import MIB
from hires.report.load import traffic_matrix
from tests.helpers.random_plans import random_plan
from tests.helpers.small_plans import LAYOUTS, plan_of


def by_kind(plan):
    messages, sent = Counter(), Counter()
    for (kind, _), (number, num_bytes) in traffic_matrix.by_class(plan).items():
        messages[kind] += number
        sent[kind] += num_bytes
    return {kind: {"messages": messages[kind], "bytes": sent[kind]} for kind in messages}


def nearly(found, totals):
    # An all-reduce rounds each rank's share down.
    for kind, held in totals.items():
        assert abs(found.get(kind, {"bytes": 0})["bytes"] - held["bytes"]) <= 32, kind
    assert set(found) <= set(totals)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("task", ["train", "infer"])
def test_bytes_are_those_of_the_plan(name, task):
    plan = plan_of(task, **LAYOUTS[name])
    nearly(by_kind(plan), plan.totals["by_kind"])
    total = sum(map(sum, traffic_matrix.matrix(plan)))
    assert abs(total - plan.totals["bytes"]) <= 64 * plan.world**2


def test_bytes_of_random_plans_are_those_of_the_planner():
    rng = random.Random(5)
    for _ in range(40):
        plan = random_plan(rng)
        nearly(by_kind(plan), plan.totals["by_kind"])


def test_one_rank_says_nothing_and_nobody_writes_to_himself():
    assert traffic_matrix.by_class(plan_of()) == {}
    found = traffic_matrix.matrix(plan_of(**LAYOUTS["sp+gems"]))
    assert all(row[rank] == 0 for rank, row in enumerate(found))


def test_message_of_a_bound_belongs_to_the_class_above():
    sizes = [0, 1023, 1024, 16 * 1024, 256 * 1024, 4 * MIB - 1, 4 * MIB]
    assert [traffic_matrix.size_class(n) for n in sizes] == [0, 0, 1, 2, 3, 3, 4]
