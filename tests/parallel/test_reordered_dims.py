"""Operators that reorder dims equal torch's own on two tiles, of square and of other maps."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.reorder_jobs import reordered


@pytest.mark.dist
@pytest.mark.parametrize("tiles", [[2, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("size", [[8, 8], [12, 8]], ids=str)
def test_reordered_dims_are_those_of_torch(size, tiles):
    for answers in run_ranks(reordered, 2, size, tiles):
        assert {n: e for n, e in answers.items() if isinstance(e, str) or e > 1e-10} == {}
