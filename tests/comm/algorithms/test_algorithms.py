"""Every algorithm gives what one operation gives, for every type and size, on pretended nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import algorithm_jobs
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("nodes", [[2, 1], [1, 3]], ids=str)
def test_every_algorithm_is_the_plain_operation(nodes: list[int]):
    found = run_ranks(algorithm_jobs.every_algorithm, sum(nodes), nodes)
    assert found == [[]] * sum(nodes)


@pytest.mark.mpi
def test_every_algorithm_is_the_plain_operation_through_mpi(mpi: str, tmp_path: Path):
    found = run_mpi(mpi, algorithm_jobs.every_algorithm, 3, [2, 1], "mpi", folder=tmp_path)
    assert found == [[]] * 3


@pytest.mark.dist
def test_algorithm_whose_communicators_were_not_made_is_refused():
    [said, _] = run_ranks(algorithm_jobs.unopened, 2)
    assert said.startswith("route gloo:two_step needs communicators that are made with a group")
    assert "hires.comm.init(algorithms=['two_step'])" in said
