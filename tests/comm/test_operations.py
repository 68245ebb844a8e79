"""Every operation of hires.comm, of every type, beside a plain reference, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.core.store.file_names import SECRET, attempt_dir
from tests.helpers import api_jobs, disagreements
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import make


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "members"), [(3, None), (3, [0, 2])])
def test_every_operation_and_type_is_right_over_gloo(num_ranks: int, members: list[int] | None):
    assert run_ranks(api_jobs.operations, num_ranks, ["gloo"], members) == [[]] * num_ranks


@pytest.mark.dist
def test_messages_of_every_type_arrive_over_gloo():
    assert run_ranks(api_jobs.messages, 2, ["gloo"]) == [[], []]


@pytest.mark.mpi
def test_every_operation_and_type_is_right_over_two_backends_at_once(mpi: str, tmp_path: Path):
    backends = ["mpi", "gloo"]
    assert run_mpi(mpi, api_jobs.operations, 3, backends, None, folder=tmp_path) == [[]] * 3


@pytest.mark.mpi
def test_messages_of_every_type_arrive_over_two_backends_at_once(mpi: str, tmp_path: Path):
    assert run_mpi(mpi, api_jobs.messages, 2, ["mpi", "gloo"], folder=tmp_path) == [[], []]


@pytest.mark.dist
def test_groups_are_the_parts_of_a_device_mesh():
    first, *_, last = run_ranks(api_jobs.groups_of_a_mesh, 4)
    assert first == [([0, 2], 0, 5), ([0, 1], 0, 3), ([0, 1, 2, 3], 0, 15)]
    assert last == [([1, 3], 1, 10), ([2, 3], 1, 12), ([0, 1, 2, 3], 3, 15)]


@pytest.mark.dist
def test_ranks_in_overlapping_groups_and_with_factors_of_their_own_call_the_same():
    assert run_ranks(api_jobs.overlapping_groups, 3) == [[3.0, 4.0, 5.0], [3.0], [4.0, 5.0]]


@pytest.mark.dist
def test_ranks_leave_and_join_again_though_rank_0_is_late():
    assert run_ranks(api_jobs.joins_again, 2) == [[3.0, 3.0, 3.0]] * 2


@pytest.mark.dist
def test_late_wait_leaves_the_operation_under_way_and_mistakes_are_named():
    late, stranger, nobody, backend, bits, lists, twice, arrived = run_ranks(api_jobs.handles, 3)[0]
    assert late.startswith("a receive from rank 1 over gloo failed: it took over 0.05 s")
    assert stranger == "this rank is not among ranks [1, 2], and uses their group"
    assert nobody == "rank 7 is not among ranks [0, 1, 2]; name one of these"
    assert backend == "backend 'mpi' is not in use; begin with it, or use gloo"
    assert bits.startswith("BXOR of torch.float32 is not defined")
    assert lists == "1 tensors for the 3 ranks [0, 1, 2]; give one for each"
    assert twice == (
        "ranks [0, 0] are no group of a world of 3; name some of ranks 0 to 2, each once"
    )
    assert arrived == "True [5.0, 5.0, 5.0]"


@pytest.mark.dist
@pytest.mark.parametrize(("backends", "plan"), [(["gloo", "null"], "same"), (["gloo"], "other")])
def test_rank_that_begins_with_other_backends_or_another_plan_is_named_on_all(
    backends: list[str], plan: str
):
    facts = f"backends {', '.join(backends)}; algorithms none; table none; plan {plan}"
    for error in run_ranks(disagreements.different_begins, 3, backends, plan):
        assert error.startswith(f"rank 1 has begun with {facts}, and rank 0 with backends gloo; ")


@pytest.mark.dist
def test_nodes_with_different_plans_end_with_the_rank_that_differs(tmp_path: Path):
    """Each node reads the plan itself, and ranks of two plans would wait for each other."""
    folders = [make(tmp_path, parallel={"tiles": tiles}) for tiles in ([2, 1], [1, 2])]
    for folder in folders:  # as a supervisor writes it
        attempt_dir(folder, 0).mkdir(exist_ok=True)
        secret = attempt_dir(folder, 0) / SECRET
        secret.touch(0o600)
        secret.write_text("of both nodes")
    for error in run_ranks(disagreements.own_folders, 2, [str(folder) for folder in folders]):
        assert error.startswith("rank 1 has begun with backends gloo; ")
        assert "all ranks need the same" in error


@pytest.mark.dist
def test_table_of_plans_has_the_same_meaning_outside_of_them():
    refused, gathered, total, backends = run_ranks(api_jobs.through_a_table_of_plans, 3)[0]
    assert refused.startswith("the tuning table names shm, and this world begins with gloo; add ")
    assert gathered == [2.0, 0.0, 1.0]
    assert total == 6000
    calls = ("isend", "irecv", "all_gather_into_tensor", "all_reduce")
    assert {name: backends[name] for name in calls} == dict.fromkeys(calls, "shm")


@pytest.mark.dist
def test_shape_of_an_output_decides_no_route():
    assert run_ranks(api_jobs.sums_into_other_shapes, 2) == [[0, 2, 4, 6, 8, 10]] * 2
