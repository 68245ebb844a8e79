"""Is the cut the best of all cuts?"""

from __future__ import annotations

import itertools
import random

import pytest

from hires.plan.stage_cuts import cut_of_least


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_has_a_cheaper_slowest_stage(num_stages, seed):
    draw = random.Random(seed)
    ends = [0, *itertools.accumulate(draw.randint(1, 3) for _ in range(7))]
    work = [draw.random() for _ in range(ends[-1])]
    factors = [draw.uniform(0.5, 2.0) for _ in range(num_stages)]  # stages of unlike ranks

    def cost_of(stage, first, last):
        return factors[stage] * sum(work[first:last])

    def slowest_of(cut):
        bounds = itertools.pairwise(ends[layer] for layer in cut)
        return max(cost_of(stage, *bound) for stage, bound in enumerate(bounds))

    cut, cost = cut_of_least(num_stages, ends, cost_of)
    inner = itertools.combinations(range(1, 7), num_stages - 1)
    assert cost == pytest.approx(min(slowest_of([0, *one, 7]) for one in inner))
    assert slowest_of(cut) == pytest.approx(cost)
    assert len(cut) == num_stages + 1
