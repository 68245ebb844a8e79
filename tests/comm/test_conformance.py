"""Every backend gives the same answers and refuses the same calls, and later calls still work.

One world of each kind runs all parts of the suite (tests/helpers/conformance.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers.conformance import MISTAKES, Spec, conform, mistake
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks

ALL = ("reductions", "operations", "messages", "kinds", "overlaps")
BY_TORCH = tuple(one for one in ALL if one != "messages")
SOME = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def algorithms(backend: str) -> dict[str, tuple[Spec, Sequence[str]]]:
    """Returns worlds whose operations name an algorithm, and one where several are under way."""
    routes = [f"{backend}:{name}" for name in ("segmented:2KiB", "direct")]
    worlds = {name: (Spec((backend,), name, types=SOME), ("operations",)) for name in routes}
    return worlds | {"several": (Spec((backend,)), ("at_once",))}


WORLDS: dict[str, tuple[int, Spec, Sequence[str]]] = {
    "gloo": (3, Spec(("gloo",)), ALL),
    "shm": (3, Spec(("shm",)), ALL),
    "gloo, shm": (2, Spec(("gloo", "shm"), "shm"), ("operations", "messages", "kinds")),
    "torch over gloo": (2, Spec(("gloo",), through="torch"), ("kinds",)),
    "torch over shm": (2, Spec(("shm",), through="torch"), BY_TORCH),
    "gloo of four": (4, Spec(("gloo",), types=(torch.int16,)), ("reductions",)),
    **{name: (3, *world) for name, world in algorithms("gloo").items()},
}
"""Name -> ranks, what carries their operations, parts."""


@functools.cache
def wrong_in(name: str) -> list[dict[str, list[str]]]:
    """Returns what is wrong on each rank of a world."""
    size, spec, parts = WORLDS[name]
    return run_ranks(conform, size, {name: (spec, parts)})


CASES = [(name, part) for name, (_, _, parts) in WORLDS.items() for part in parts]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "part"), CASES, ids=[f"{one}-{part}" for one, part in CASES])
def test_backend_conforms(name: str, part: str):
    assert [one[f"{name} {part}"] for one in wrong_in(name)] == [[]] * WORLDS[name][0]


OVER_MPI = {
    "mpi": (Spec(("mpi",)), ALL),
    "mpi, gloo": (Spec(("mpi", "gloo"), "gloo"), ("operations", "messages")),
    **algorithms("mpi"),
}


@pytest.mark.mpi
def test_mpi_conforms(mpi: str, tmp_path: Path):
    for wrong in run_mpi(mpi, conform, 3, OVER_MPI, folder=tmp_path):
        assert {part: text for part, text in wrong.items() if text} == {}
        assert len(wrong) == sum(len(parts) for _, parts in OVER_MPI.values())


# A rank went on after its error, and its next call was paired with the one that the others were in:
# the sum was wrong, and no rank had an error.
@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_of_one_rank_is_named_on_all_and_no_later_sum_is_wrong(backend: str, name: str):
    check_mistake(run_ranks(mistake, 3, Spec((backend,), timeout_s=4.0), name))


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["type", "refused"])
def test_mistake_of_one_rank_of_an_mpi(mpi: str, name: str, tmp_path: Path):
    spec = Spec(("mpi",), timeout_s=4.0)
    check_mistake(run_mpi(mpi, mistake, 3, spec, name, folder=tmp_path))


def check_mistake(answers: list[list[str]]) -> None:
    for rank, errors in enumerate(answers):
        assert "wrong" not in str(errors), rank
        first = next(place for place, error in enumerate(errors) if error != "done")
        assert first < 2
        # Ranks that were at different calls do not go on together.
        assert "done" not in errors[first + 1 :]
        assert any("all_reduce of" in error and "rank 1" in error for error in errors)
