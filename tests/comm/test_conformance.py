"""Every backend gives the same answers and refuses the same calls, and later calls still work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hires.comm.backends import attach
from tests.helpers import conformance
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks

WORLDS = {"gloo": (["gloo"], None), "shm": (["shm"], None), "cma": (["cma"], None)}
WORLDS |= {"mix": (["gloo", "shm"], "shm")}
JOBS = ("reductions", "kinds", "overlaps")


@pytest.fixture(params=[*WORLDS])
def world(request) -> tuple[list[str], str | None]:
    if request.param == "cma" and not attach.is_allowed():
        pytest.skip("ranks may not read each other's memory here")
    return WORLDS[request.param]


@pytest.mark.dist
@pytest.mark.parametrize("job", JOBS)
def test_backend_conforms(world: Any, job: str):
    backends, backend = world
    assert run_ranks(getattr(conformance, job), 2, backends, "comm", backend) == [[]] * 2


@pytest.mark.dist
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_backend_conforms_through_torch(backend: str, job: str):
    assert run_ranks(getattr(conformance, job), 2, [backend], "torch", None) == [[]] * 2


@pytest.mark.mpi
@pytest.mark.parametrize("job", JOBS)
def test_mpi_conforms(mpi: str, job: str, tmp_path: Path):
    function = getattr(conformance, job)
    assert run_mpi(mpi, function, 2, ["mpi"], "comm", None, folder=tmp_path) == [[]] * 2


# A rank went on after its error, and its next call was paired with the one that the others were in:
# the sum was wrong, and no rank had an error.
@pytest.mark.dist
@pytest.mark.parametrize("mistake", conformance.MISTAKES)
def test_mistake_of_one_rank_is_named_on_all_and_no_later_sum_is_wrong(world: Any, mistake: str):
    backends, _ = world
    check(run_ranks(conformance.mistake, 3, backends, "comm", mistake))


@pytest.mark.mpi
@pytest.mark.parametrize("mistake", ["type", "refused"])
def test_mistake_of_one_rank_of_an_mpi(mpi: str, mistake: str, tmp_path: Path):
    check(run_mpi(mpi, conformance.mistake, 3, ["mpi"], "comm", mistake, folder=tmp_path))


def check(answers: list[list[str]]) -> None:
    for rank, errors in enumerate(answers):
        assert "wrong" not in str(errors), rank
        first = next(place for place, error in enumerate(errors) if error != "done")
        assert first < 2
        # Ranks that were at different calls do not go on together.
        assert "done" not in errors[first + 1 :]
        assert any("all_reduce of" in error and "rank 1" in error for error in errors)
