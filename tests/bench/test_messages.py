"""Messages are called and checked rightly, libraries take fair turns, and rates are nccl-tests'."""

from __future__ import annotations

import json
import time

import pytest

from hires.bench import comm_bench
from hires.bench.bench_main import run
from hires.bench.comm_bench import applies_to, cells_of, options_of, sizes_of, sweep
from hires.bench.messages import (
    BARRIER,
    BENCHED,
    MESSAGES,
    BenchBuffers,
    BenchCell,
    RaceWorld,
    messages_in,
    race_cell,
    timed,
    window,
)
from hires.cli.verbs import verb_bench
from hires.core.errors import ConfigError
from tests.helpers.bench_jobs import forked, row

ALONE = RaceWorld(0, 1, lambda: None, lambda tensor: None)
SUM = BenchCell("all_reduce", 64)


@pytest.mark.dist
def test_every_operation_is_right_through_hires_and_torch():
    cells, ways = cells_of(BENCHED, (64, 1000), ("float32", "int8")), ["gloo", "shm", "raw:gloo"]
    rows = [*forked("hires.bench.comm_bench:run_cells", 3, 60, cells, 1, 1e-9, "cpu", ways)]
    assert [one["operation"] for one in rows] == [cell.operation for cell in cells]
    for one in rows:
        assert {way: one["ways"][way].get("wrong") for way in ways} == dict.fromkeys(ways, 0), one


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


def doing(call, world=ALONE):
    return lambda buffers: timed(lambda: call(buffers), world)


def right(buffers):
    return None  # a sum of one rank is there already


def test_wrong_number_is_found_in_the_first_round_and_in_the_last():
    calls = []

    def late_error(buffers):
        calls.append(0)
        if len(calls) > 13:
            buffers.output[0] += 1

    def error(buffers):
        buffers.output[0] += 1

    libraries = {"late": doing(late_error), "wrong": doing(error), "right": doing(right)}
    ways = race_cell(SUM, libraries, ALONE, 4, 1e-9)["ways"]
    assert [ways[name]["wrong"] for name in ("late", "wrong", "right")] == [1, 2, 0]
    assert len(ways["right"]["rounds_s"]) == 4
    assert ways["right"]["count"] == 8


def test_slowest_rank_is_the_sample_and_the_fence_is_not_timed():
    def largest(tensor):
        if tensor.numel() > 1:  # the other rank took 1 s in the first call of a block
            tensor[0] = 1.0

    world = RaceWorld(0, 1, lambda: time.sleep(0.01), largest)
    way = race_cell(SUM, {"a": doing(right, world)}, world, 1, 1e-9)["ways"]["a"]
    assert way["p50_s"] == pytest.approx(0.5, abs=0.005)


def test_library_without_the_operation_is_left_out_with_its_reason_on_all_ranks():
    def refuse(buffers):
        raise ValueError("no sums of\nthis type")

    ways = race_cell(SUM, {"a": doing(right), "refuses": refuse}, ALONE, 1, 1e-9)["ways"]
    assert ways["refuses"] == {"missing": "no sums of this type"}
    assert "p50_s" in ways["a"]
    elsewhere = RaceWorld(0, 1, lambda: None, lambda tensor: tensor.fill_(1.0))
    ways = race_cell(SUM, {"a": doing(right)}, elsewhere, 1, 1e-9)["ways"]
    assert ways["a"] == {"missing": "another rank lacks it"}


def task_of(*words, **changed):
    task = verb_bench.message_task(verb_bench.COMM.read(["comm", *words]), "comm", "comm")
    return {**task, "start": "torchrun", **changed}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only all_reduce,halo", "--only: unknown 'halo'"),
        ("--ranks 1", "--ranks 1: write numbers above 1"),
        ("--routes mpi:segmented", "has no segment size"),
        ("--sizes 8KiB..4KiB", "--sizes 8KiB..4KiB is no size"),
        ("--routes table", "needs --table FILE"),
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
    assert sizes_of("16,1KiB..64KiBx8") == (16, 1024, 8192, 65536)
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


def test_cell_is_shown_only_once_it_is_kept(monkeypatch, caplog):
    caplog.set_level("INFO")  # Ctrl-C after "1 of 2" must not lose that cell
    cells = [BenchCell("all_reduce", size) for size in (64, 4096)]
    measured = [row("all_reduce", cell.num_bytes, {"shm": 1.0}) for cell in cells]
    monkeypatch.setattr(comm_bench, "stream_ranks", lambda *_, **__: iter(measured))
    shown = []
    for rows in sweep(options_of(task_of()), cells, ["shm"]):
        shown.append((len(rows), len(caplog.records)))
    assert shown == [(1, 0), (2, 1)]
    assert "1 of 2: all_reduce 64 B" in caplog.text


def test_wrong_results_are_named_and_have_no_number(monkeypatch):
    wrong = row("reduce", 64, {"mpi": 1.0, "gloo": 2.0}, wrong=("mpi",))
    for way in wrong["ways"].values():
        way |= {"count": 3, "p99_s": 3.0}
    monkeypatch.setattr(comm_bench, "stream_ranks", lambda *_, **__: iter([wrong]))
    [result] = comm_bench.measure(task_of("--only", "reduce", "--sizes", "64"))
    assert not result["ok"]
    assert "WRONG: mpi: reduce 64 B" in "\n".join(comm_bench.facts(result))
    [table] = comm_bench.tables(result)
    assert (table.rows[0]["mpi"], table.rows[0]["fastest"]) == ("WRONG", "gloo")


@pytest.mark.mpi
def test_every_backend_and_baseline_is_right_under_an_mpi(mpi, capsys):
    words = ["--sizes", "16,256KiB", "--seconds", "1e-6", "--ranks", "2", "--json"]
    assert run(task_of(*words, start=mpi, timeout=250, out=""), comm_bench) == 0
    result = json.loads(capsys.readouterr().out)
    ways = {name for row in result["rows"] for name, way in row["ways"].items() if "p50_s" in way}
    assert ways >= {"gloo", "mpi", "shm", "raw:gloo", "raw:mpi4py", "mpi:direct", "gloo:direct"}
    assert not result["wrong"]
