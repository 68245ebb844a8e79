"""Messages are called and checked rightly, libraries take fair turns, and rates are nccl-tests'."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from hires.bench import comm_bench
from hires.bench.bench_main import group_tables, page, run
from hires.bench.comm_bench import applies_to, cells_of
from hires.bench.messages import (
    BARRIER,
    BENCHED,
    MESSAGES,
    BenchBuffers,
    BenchCell,
    MessageCalls,
    messages_in,
    window,
)
from hires.bench.race import Samples
from hires.cli.verbs import verb_bench
from hires.core.errors import ConfigError
from tests.helpers.bench_jobs import forked, rows_of

SUM = BenchCell("all_reduce", 64)


@pytest.mark.dist
def test_every_operation_is_right_through_hires_and_torch():
    cells, ways = cells_of(BENCHED, (1000,), ("int8",)), ["gloo", "shm", "raw:gloo"]
    measured = [*forked("hires.bench.comm_bench:run_cells", 3, 60, cells, 1, 1e-9, "cpu", ways)]
    assert [rows[0]["operation"] for rows in measured] == [cell.operation for cell in cells]
    for rows in measured:
        assert [row["name"] for row in rows if row["ok"] and "step_s" in row] == ways, rows


@pytest.mark.parametrize("name", [name for name in BENCHED if name != BARRIER])
def test_any_wrong_number_of_a_result_is_found(name):
    for rank in range(3):
        buffers = BenchBuffers(BenchCell(name, 1000, "int8"), rank, 3)
        buffers.fill()
        expected = buffers.expected()
        no_result = {"reduce": rank > 0, "gather": rank > 0, "bandwidth": rank < 2}
        assert (expected is None) == no_result.get(name, name in MESSAGES and rank == 1)
        if expected is not None:
            assert name == "broadcast" or buffers.num_wrong() > 0
            buffers.output.copy_(expected.clone())
            assert buffers.num_wrong() == 0
            buffers.output.view(-1)[-1:] += 1
            assert buffers.num_wrong() == 1


def test_bandwidths_are_those_of_nccl_tests_and_windows_those_of_osu():
    # 1 MB in 1 ms on four ranks; factors of doc/PERFORMANCE.md.
    rates = {name: one.bandwidths(1_000_000, 4, 1e-3) for name, one in BENCHED.items()}
    assert rates["all_reduce"] == (1e9, 1.5e9)
    assert rates["all_gather_into_tensor"] == (4e9, 3e9)
    assert rates["reduce_scatter_tensor"] == rates["all_to_all_single"] == (1e9, 0.75e9)
    assert rates["broadcast"] == rates["latency"] == (1e9, 1e9)
    assert rates["bidirectional"] == (2e9, 2e9)
    assert [window(size) for size in (4, 1 << 20, 1 << 26, 1 << 30)] == [64, 64, 2, 2]
    assert [messages_in(name, 4) for name in ("latency", "bandwidth", "all_reduce")] == [2, 64, 1]


@pytest.mark.dist
def test_library_that_refuses_on_a_rank_or_is_wrong_at_last_is_named():
    [rows] = forked(f"{__name__}:cell_of_odd_libraries", 2, 60)
    refused, late, right = rows
    assert refused["not_run"] == "no sums of this type"
    assert [late["ok"], right["ok"]] == [False, True]
    assert "step_s" in right


def cell_of_odd_libraries(world):
    """Yields the rows of a cell: one is refused by rank 1, one gets wrong, and one is right."""

    def binder(way):
        def bound(buffers, place, fence):
            numbers = itertools.count()

            def call():
                buffers.output.copy_(buffers.expected())
                buffers.output[0] += way == "gloo" and next(numbers) > 2

            if way == "gloo:direct" and world.rank == 1:
                raise ValueError("no sums of\nthis type")
            return MessageCalls(call, buffers, place, fence)

        return bound

    comm_bench._binder, ways = binder, ["gloo:direct", "gloo", "shm"]
    yield from comm_bench.run_cells(world, [SUM], 1, 1e-9, "cpu", ways)


def cell_of_a_known_time(world):
    """Yields the rows of a ping-pong that takes 2 s."""
    two_s = [[2.0, 2.0]], [0.0]
    comm_bench.race = lambda runners, *_: iter([dict.fromkeys(runners, Samples(*two_s))])
    world = replace(world, local_rank=0, local_size=1)  # two nodes
    yield from comm_bench.run_cells(world, [BenchCell("latency", 64)], 1, 1.0, "cpu", ["gloo"])


@pytest.mark.dist
def test_latency_is_half_of_a_ping_pong():
    [[row]] = forked(f"{__name__}:cell_of_a_known_time", 2, 60)
    assert (row["step_s"]["median"], [*row["bytes_per_s"]]) == (1.0, [64.0, 64.0])
    assert (row["ranks"], row["ranks_per_node"], row["bytes"]) == (2, 1, 64)
    [table] = group_tables({"groups": {"latency": [row]}})
    [cells] = table.rows
    assert (cells["size"], cells["p99"], cells["gloo"]) == ("64 B", "1000000.0", "1000000.0")


def task_of(*words, **changed):
    words = ["comm", "--start", "torchrun", *words]
    task = verb_bench.message_task(verb_bench.COMM.read(words), "comm", "comm")
    return {**task, **changed}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only all_reduce,halo", "--only 'halo' is unknown"),
        ("--routes mpi:segmented", "has no segment size"),
        ("--sizes 8KiB..4KiB", "--sizes 8KiB..4KiB is no size"),
        ("--routes table", "needs --table FILE"),
        ("--hosts a,b", "--start torchrun starts ranks on this machine alone"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ConfigError) as error:
        list(comm_bench.measure(task_of(*words.split())))
    assert message in str(error.value)


def test_cells_leave_out_what_has_no_other_form_and_ways_what_is_no_gain():
    cells = cells_of(("latency", "barrier"), (4, 8), ("float32", "int8"))
    assert [cell[1:] for cell in cells if cell.operation == BARRIER] == [(4, "float32")]
    assert len(cells) == 5
    assert task_of("--sizes", "16,1KiB..4KiB")["sizes"] == [16, 1024, 2048, 4096]
    assert {*verb_bench.OPERATIONS} == {*BENCHED}
    for way, operation, num_bytes, expected in (
        ("mpi", "all_reduce", 4, True),
        ("mpi:segmented:4MiB", "all_reduce", 4 << 20, False),
        ("mpi:segmented:4MiB", "all_reduce", 5 << 20, True),
        ("mpi:segmented:4MiB", "gather", 5 << 20, False),
        ("gloo:direct", "all_reduce", 1 << 20, True),
        ("gloo:direct", "all_reduce", 2 << 20, False),
        ("raw:gloo", "gather", 5 << 20, True),
    ):
        assert applies_to(way, operation, num_bytes) == expected, (way, operation)


def test_stopped_measurement_goes_on_with_the_cells_that_it_lacks(tmp_path, monkeypatch, capsys):
    def measured(job, ranks, timeout_s, cells, *rest, **where):
        left.append((ranks, [cell.num_bytes for cell in cells]))
        for cell in cells:
            yield rows_of("reduce", cell.num_bytes, {"shm": 1.0}, ranks)
            if len(left) == 1:
                raise KeyboardInterrupt

    left = []
    monkeypatch.setattr(comm_bench, "stream_ranks", measured)
    words = "--only", "reduce", "--sizes", "64,128", "--ranks", "2,4", "--json"
    task, every = task_of(*words, "--out", str(tmp_path)), [(2, [64, 128]), (4, [64, 128])]
    assert [run(task, comm_bench), run(task, comm_bench), run(task, comm_bench)] == [130, 0, 0]
    assert left == [every[0], (2, [128]), every[1], *every]  # what is complete is measured anew
    result = json.loads((tmp_path / "comm.json").read_text())
    assert [row["bytes"] for rows in result["groups"].values() for row in rows] == 2 * [64, 128]
    # Nor does it go on on another machine, or from another commit.
    for key in ("command", "git", "hires", "torch", "hardware"):
        stopped = {**result, "complete": False, key: "another", "groups": {"a": []}}
        (tmp_path / "comm.json").write_text(json.dumps(stopped))
        assert run(task, comm_bench) == 0
        assert left[-2:] == every, key


def test_wrong_results_are_named_and_have_no_number(monkeypatch):
    wrong = rows_of("reduce", 64, {"mpi": 1.0, "gloo": 2.0}, wrong=("mpi",))
    monkeypatch.setattr(comm_bench, "stream_ranks", lambda *_, **__: iter([wrong]))
    [result] = comm_bench.measure(task_of("--only", "reduce", "--sizes", "64"))
    assert not result["ok"]
    monkeypatch.setattr(comm_bench, "stream_ranks", lambda *_, **__: iter([wrong]))
    task = task_of("--only", "reduce", "--sizes", "64", "--json", out="")
    assert run(task, comm_bench) == 1
    [table] = group_tables(result)
    assert (table.rows[0]["mpi"], table.rows[0]["fastest"]) == ("WRONG", "gloo")
    assert "WRONG: mpi in reduce, float32, 2 ranks" in page(result, [table])


@pytest.mark.mpi
def test_every_backend_and_baseline_is_right_under_an_mpi(mpi, capsys):
    words = ["--sizes", "16,256KiB", "--seconds", "1e-6", "--ranks", "2", "--json"]
    assert run(task_of(*words, start=mpi, timeout=250, out=""), comm_bench) == 0
    result = json.loads(capsys.readouterr().out)
    ways = {r["name"] for rows in result["groups"].values() for r in rows if "step_s" in r}
    assert ways >= {"gloo", "mpi", "shm", "raw:gloo", "raw:mpi4py", "mpi:direct", "gloo:direct"}
    assert not result["wrong"]
