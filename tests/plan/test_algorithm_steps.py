"""Stages of algorithms: whom they join, and that ranks issue them in one order."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from hires.core.errors import ConfigError
from hires.plan.algorithm_steps import STAGED, communicators, order, stages

NODES = (0, 0, 0, 1, 1, 2)


def said(operation: str, rank: int, root: int = -1) -> list[str]:
    found = stages(operation, "hierarchical", (0, 1, 2, 3, 4, 5), NODES, rank, root)
    return [f"{s.operation} {s.communicator.name} {[*s.communicator.ranks]}" for s in found]


def test_sum_goes_to_the_first_rank_of_each_node_and_back():
    assert said("all_reduce", 0) == [
        "reduce inside [0, 1, 2]",
        "all_reduce leaders [0, 3, 5]",
        "broadcast back [0, 1, 2]",
    ]
    assert said("all_reduce", 4) == ["reduce inside [3, 4]", "broadcast back [3, 4]"]
    assert said("all_reduce", 5) == ["all_reduce leaders [0, 3, 5]"]


def test_broadcast_of_a_rank_that_is_not_the_first_of_its_node():
    assert said("broadcast", 4, root=4) == ["broadcast inside [3, 4]"]
    assert said("broadcast", 3, root=4) == [
        "broadcast inside [3, 4]",
        "broadcast leaders [0, 3, 5]",
    ]
    assert said("broadcast", 1, root=4) == ["broadcast back [0, 1, 2]"]


@pytest.mark.parametrize("nodes", [(0,) * 5, (0, 1, 2, 3, 4), (0, 0, 1, 1, 1), (0, 1, 0, 1, 0)])
@pytest.mark.parametrize("algorithm", STAGED)
def test_ranks_issue_on_each_communicator_in_one_order(nodes, algorithm):
    ranks = (0, 1, 2, 3, 4)
    for operation, root in itertools.product(STAGED[algorithm], ranks):
        issued = defaultdict(list)
        for rank in ranks:
            own = stages(operation, algorithm, ranks, nodes, rank, root)
            mine = defaultdict(list)
            for stage, piece in order(len(own), 4):
                mine[own[stage].communicator].append((own[stage].operation, own[stage].root, piece))
            for communicator, steps in mine.items():
                assert rank in communicator.ranks
                issued[communicator].append(steps)
        for communicator, sequences in issued.items():
            assert len(sequences) == len(communicator.ranks)
            assert all(steps == sequences[0] for steps in sequences)
            # It is one that all ranks of the world create, or the group's own.
            own = {"", *communicators(algorithm, ranks, nodes)}
            assert communicator.name == "" or communicator in own


def test_operation_that_an_algorithm_lacks_is_refused():
    with pytest.raises(
        ConfigError,
        match="two_step cannot carry out broadcast; choose one of "
        "collective, segmented, hierarchical, direct",
    ):
        stages("broadcast", "two_step", (0, 1), (0, 0), 0, 0)
