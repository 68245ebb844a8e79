"""Functions of hires.comm between real ranks."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import gather_of_rank, silent_peer
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("num_elements", [1, 100_000])  # point to point, and gloo's collective
def test_gather_stacks_in_rank_order_and_reduce_sums(num_elements: int):
    for answer in run_ranks(gather_of_rank, 3, num_elements):
        assert answer == [0.0, 1.0, 2.0, 3.0]


def test_silent_peer_is_named_within_the_timeout():
    told, _ = run_ranks(silent_peer, 2, timeout_s=30)
    assert "a receive from rank 1" in told
