"""Every backend gives the same answers and refuses the same calls, and later calls still work.

One world of each kind runs all parts of the suite (tests/helpers/conformance.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers import new_backend
from tests.helpers.conformance import Spec, conform
from tests.helpers.mistakes import mistake
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks

ALL = ("reductions", "operations", "messages", "kinds", "overlaps")
BY_TORCH = ("reductions", "operations", "kinds", "overlaps")
SOME = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def algorithms(backend: str) -> dict[str, tuple[Spec, Sequence[str]]]:
    """Returns worlds whose operations name an algorithm."""
    routes = [f"{backend}:{name}" for name in ("segmented:2KiB", "direct")]
    return {name: (Spec((backend,), name, types=SOME), ("operations",)) for name in routes}


WORLDS: dict[str, tuple[int, Spec, Sequence[str]]] = {
    "gloo": (3, Spec(("gloo",)), ALL),
    "shm": (3, Spec(("shm",)), ALL),
    "gloo, shm": (2, Spec(("gloo", "shm"), "shm"), ("operations", "messages", "kinds")),
    "torch over shm": (2, Spec(("shm",), through="torch"), BY_TORCH),
    "files": (3, Spec(("files",), types=SOME), ("operations", "messages")),
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


PLAN_OVER_FILES = """
import hires.backends
hires.backends.__path__.append({folder!r})
from hires.core.config.comm_config import CommConfig
from hires.plan.prove import judged
from hires.plan.traffic import backends_of_plan
from tests.helpers.layouts import config_of, plan_of
from hires.plan.routes import MEMORY, ONE_MACHINE
def plan_over_files(**keys):
    comm = {{"backend": "files", "shared_memory": False}}
    return plan_of(config_of(parallel={{"tiles": [2, 1]}}, comm=comm, **keys))
plan = plan_over_files()
assert plan.gradients != "together"  # which is for sums in shared memory alone
assert "files" in {{*ONE_MACHINE}} - {{*MEMORY}}
far = plan_over_files(launcher={{"name": "mpirun", "hosts": ["a", "b"]}})
assert "one machine only" in str(far.findings), far.findings
assert "files" in CommConfig.choices
assert plan.ok, plan.findings
assert backends_of_plan(plan)[0] == "files"
assert any(rule.route.startswith("files") for rule in plan.routes), plan.routes
assert judged(plan).to_dict()["ok"]
"""
BENCH_OF_FILES = """
import os
from hires.bench.comm_bench import cells_of, routes_here, run_cells
from hires.core.ranks import meeting
from hires.core.ranks.world import World
ways, task = ["files", "gloo"], {{"device": "cpu", "start": "torchrun"}}
cells = cells_of(["all_reduce"], [64], ["float32"])
with meeting.reserve_port(0) as port:
    rank = int(os.fork() == 0)
    world = World(rank, 2, rank, 2, "127.0.0.1", port, 0)
    [rows] = run_cells(world, cells, 1, 1e-9, "cpu", ways)
assert [row["name"] for row in rows if row["ok"] and "step_s" in row] == ways, rows
assert {{*ways, "shm", "files:direct"}} < {{*routes_here(task)}}
assert not any(route.startswith(("mpi", "nccl", "shm:")) for route in routes_here(task))
"""


@pytest.mark.dist
def test_new_backend_is_one_module_that_is_listed_routed_proved_and_measured(python):
    code = (PLAN_OVER_FILES + BENCH_OF_FILES).format(folder=new_backend.FOLDER)
    answer = python("-c", code)
    assert answer.code == 0, answer.err


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


SUM, SEND, RECV = "all_reduce of", "rank 0 calls send of 16 B float32", "rank 1 calls recv of 8 B"
WRONG = {
    # what rank 1 does otherwise: backends, comm.check, what an error says
    "size": [
        ("gloo", "late", f"rank 0 calls {SUM} 16 B float32 (sum)", f"rank 1 calls {SUM} 20 B")
    ],
    "large size": [("gloo", "late", f"rank 0 calls {SUM} 16 B", f"rank 1 calls {SUM} 16000 B")],
    "type": [(name, "late", SUM) for name in ("gloo", "shm", "files")],
    "operation": [("gloo", "every", SUM), ("shm", "late", SUM)],
    "refused": [("gloo", "late", SUM), ("shm", "late", SUM)],
    # Over shm each of two ranks that took itself for the root kept its numbers, without an error.
    "root": [("gloo", "late", "(root 1)"), ("shm", "late", "root", "(root 1)")],
    "message size": [("gloo", "late", SEND, RECV)],
    # Without this check the numbers are wrong, and only shutdown reports it.
    "message type": [(n, "late", SEND, "recv of 16 B int32") for n in ("gloo", "shm", "files")],
    "tag": [("gloo", "late", "of which rank 0 has not called its side")],
    "order": [("gloo shm", "late", "in different orders")],
}
CALLS = [(name, *row) for name, rows in WRONG.items() for row in rows]


# A rank went on after its error, and its next call was paired with the one that the others were in:
# the sum was wrong, and no rank had an error. And gloo ends the process of a rank that gives less.
@pytest.mark.dist
@pytest.mark.parametrize("case", CALLS, ids=[f"{one[0]}-{one[1]}" for one in CALLS])
def test_mistake_of_one_rank_is_named_on_all_and_no_later_sum_is_wrong(case: tuple[str, ...]):
    name, backends, check, *words = case
    size = 2 if name in ("message size", "message type", "tag", "order") else 3
    spec = Spec((*backends.split(),), timeout_s=1.5, check=check)
    answers = run_ranks(mistake, size, spec, name)
    check_mistake(answers, words)
    assert name != "message type" or words[-1] in answers[1][0]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("refused", 3, [SUM]), ("order", 2, ["in different orders", "over mpi"])],
)
def test_mistake_of_one_rank_of_an_mpi(mpi: str, name: str, size: int, words, tmp_path: Path):
    spec = Spec(("gloo", "mpi") if name == "order" else ("mpi",), timeout_s=4.0)
    check_mistake(run_mpi(mpi, mistake, size, spec, name, folder=tmp_path), words)


def check_mistake(answers: list[list[str]], words: list[str]) -> None:
    assert "wrong" not in str(answers)
    for errors in answers:
        # Ranks that were at different calls do not go on together.
        is_done = [error == "done" for error in errors]
        assert is_done == sorted(is_done, reverse=True)
        assert len(answers) == 2 or not all(is_done[:2])
    texts = [error for errors in answers for error in errors]
    assert any(all(word in text for word in (*words, "rank 1")) for text in texts), texts
