"""Does a step take longer where ranks share cores, by as much as they do?"""

from __future__ import annotations

import pytest

from hires.plan.simulation.crowding import concurrency, crowded_step_s
from hires.plan.simulation.simulate import Simulation


def simulation(*spans):
    ends = [end for rank in spans for _, end in rank]
    return Simulation(max(ends), [], [], [], [list(rank) for rank in spans])


DRAWN = simulation([(0, 4), (8, 12)], [(0, 8)], [(4, 12)])
"""  rank 0   ####....####
     rank 1   ########....
     rank 2   ....########     two at any moment"""


@pytest.mark.parametrize(("cores", "step_s"), [(3, 12), (2, 12), (1, 24), (0.5, 48)])
def test_each_moment_takes_as_much_longer_as_ranks_exceed_cores(cores, step_s):
    assert crowded_step_s(DRAWN, cores) == step_s


def test_moments_count_apart():
    #  ####....      two for 4 s, then one for 4 s: on one core 8 + 4
    #  ########
    assert crowded_step_s(simulation([(0, 4)], [(0, 8)]), 1) == 12


def test_replicas_share_the_cores():
    alone = simulation([(0, 4)])
    assert crowded_step_s(alone, 2, copies=4) == 8
    assert crowded_step_s(alone, 2, copies=2) == 4


def test_ranks_that_compute_at_once_in_the_mean():
    assert concurrency(DRAWN) == 2
    assert concurrency(simulation([(0, 4)], [(0, 8)])) == 1.5
