"""Does `hires bench comm` measure, check, go on where it stopped, and weigh what it found?"""

from __future__ import annotations

import json

import pytest

from hires.bench import comm_bench
from hires.bench.bench_output import origin
from hires.bench.comm_bench import BENCHMARK, CommOptions
from hires.bench.comm_tables import facts, tables
from hires.bench.sweep import cells_of, is_worth, sizes_of, wrong
from hires.bench.table_choice import table_of
from hires.core.errors import ConfigError
from tests.helpers.bench_rows import row


def test_wrong_results_end_the_benchmark_with_code_1_and_are_named():
    rows = [row("reduce", 64, {"mpi": 1.0, "gloo": 2.0}, wrong=("mpi",))]
    assert wrong(rows) == ["mpi: reduce 64 B, 2 ranks"]
    result = comm_bench.result_of({"start": "openmpi", "rounds": 5}, rows)
    assert not result["ok"]
    result["rows"][0]["ways"]["mpi"]["count"] = result["rows"][0]["ways"]["gloo"]["count"] = 3
    result["rows"][0]["ways"]["mpi"]["p99_s"] = result["rows"][0]["ways"]["gloo"]["p99_s"] = 3.0
    assert "WRONG: mpi: reduce 64 B" in "\n".join(facts(result))
    assert tables(result)[0].rows[0]["mpi"].endswith("WRONG")


def test_cells_leave_out_what_has_no_other_form():
    cells = cells_of(("latency", "all_reduce", "barrier"), (4, 8), ("float32",), (True, False))
    assert [(c.operation, c.num_bytes, c.blocking) for c in cells] == [
        *(("latency", 4, True), ("latency", 8, True)),
        *(("all_reduce", 4, True), ("all_reduce", 4, False)),
        *(("all_reduce", 8, True), ("all_reduce", 8, False)),
        *(("barrier", 4, True), ("barrier", 4, False)),
    ]


@pytest.mark.parametrize(
    ("way", "operation", "num_bytes", "near", "expected"),
    [
        ("mpi", "all_reduce", 4, 2, True),
        ("mpi:segmented:4MiB", "all_reduce", 4 << 20, 2, False),
        ("mpi:segmented:4MiB", "all_reduce", 5 << 20, 2, True),
        ("mpi:segmented:4MiB", "gather", 5 << 20, 2, False),
        ("mpi:hierarchical", "all_reduce", 64, 4, False),
        ("mpi:hierarchical", "all_reduce", 64, 2, True),
        ("gloo:direct", "all_gather_into_tensor", 64, 2, True),
        ("gloo:direct", "all_gather_into_tensor", 8 << 20, 2, False),
        ("raw:gloo", "gather", 64, 2, True),
        ("cma:shares", "all_reduce", 64, 4, True),
        ("cma:shares", "all_reduce", 64, 2, False),
        ("cma:shares", "reduce", 64, 4, False),
    ],
)
def test_algorithms_run_where_they_differ_from_their_backend(
    way, operation, num_bytes, near, expected
):
    cell = {"operation": operation, "num_bytes": num_bytes, "ranks": 4, "ranks_per_node": near}
    assert is_worth(way, cell) is expected


@pytest.mark.parametrize(
    "text", ["", "8..4..2", "many", "4..", "64KiB..4", "4x2", "4..8x1", "4..8xa"]
)
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="is no size; write "):
        sizes_of("--sizes", text)


@pytest.mark.slow
@pytest.mark.dist
def test_small_sweep_is_kept_and_goes_on_where_it_stopped(tmp_path, capsys):
    words = ["--only", "all_reduce,barrier", "--sizes", "4,1KiB,64KiB", "--modes", "blocking"]
    words += ["--ways", "gloo,raw:gloo", "--start", "torchrun", "--quick", "--timeout", "100"]
    words += ["--out", str(tmp_path)]
    assert BENCHMARK.main(words) == 0
    assert "results: all right" in capsys.readouterr().out
    result = json.loads((tmp_path / "comm.json").read_text())
    assert [row["bytes"] for row in result["rows"]] == [4, 1024, 65536, 4]
    assert {way for row in result["rows"] for way in row["ways"]} == {"gloo", "raw:gloo"}
    lines = (tmp_path / "comm.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4
    assert (tmp_path / "comm-all_reduce.svg").exists()
    # Of a run that was stopped only what is missing is measured.
    first = result["rows"][0]["ways"]
    result["rows"] = result["rows"][:-1]
    (tmp_path / "comm.json").write_text(json.dumps(result))
    assert BENCHMARK.main(words) == 0
    again = json.loads((tmp_path / "comm.json").read_text())
    assert again["rows"][0]["ways"] == first
    assert len(again["rows"]) == 4


def test_cells_of_another_table_are_not_taken_over(tmp_path, monkeypatch):
    def sweep(options, cells, ways, rows, table):
        rows.append(row("all_reduce", 64, {"mpi": 1.0}))
        yield

    def measured(fastest, former):
        times = {"mpi": 2.0, "shm": 2.0, fastest: 1.0}
        table_of([row("all_reduce", 64, times)], {}, "mpi").write(tmp_path / "table.json")
        *_, last = comm_bench.measure(CommOptions(table=str(tmp_path / "table.json")), former)
        return last

    monkeypatch.setattr(comm_bench, "sweep", sweep)
    first = measured("mpi", None)
    assert len(measured("mpi", first)["rows"]) == 2
    assert len(measured("shm", first)["rows"]) == 1


@pytest.mark.parametrize("name", ["git", "torch", "hardware"])
def test_cells_of_another_code_or_machine_are_not_taken_over(tmp_path, name, caplog):
    former = {**origin("hires bench comm"), "rows": [1]}
    kept = tmp_path / "comm.json"
    kept.write_text(json.dumps(former))
    assert BENCHMARK._former(tmp_path) == former
    kept.write_text(json.dumps({**former, name: "another"}))
    with caplog.at_level("INFO"):
        assert BENCHMARK._former(tmp_path) is None
    assert f"measured with another {name} another: all of it is measured again" in caplog.text


@pytest.mark.mpi
def test_every_backend_and_baseline_is_right_under_an_mpi(mpi, capsys):
    words = ["--sizes", "16,256KiB", "--modes", "blocking", "--quick", "--seconds", "1e-6"]
    words += ["--start", mpi, "--ranks", "2,3", "--timeout", "250", "--json"]
    assert BENCHMARK.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    ways = {way for row in result["rows"] for way, one in row["ways"].items() if "p50_s" in one}
    assert ways >= {"gloo", "mpi", "shm", "cma", "raw:gloo", "raw:mpi4py", "cma:shares"}
    assert ways >= {"mpi:direct", "gloo:direct"}
    assert not result["wrong"]


def test_quick_keeps_sizes_that_were_named():
    assert CommOptions(quick=True, sizes=(8,)).sizes == (8,)


def test_coarse_table_is_measured_as_such(tmp_path, monkeypatch):
    rows = [
        row("all_reduce", 64, {"shm": 1.0, "mpi": 3.0}),
        row("all_reduce", 1 << 20, {"shm": 9.0, "mpi": 2.0}),
    ]
    path, given = tmp_path / "table.json", []
    table_of(rows, {}, "gloo").write(path)
    monkeypatch.setattr(comm_bench, "sweep", lambda *args: given.append(args[-1]) or iter(()))
    for granularity, number in (("fine", 2), ("coarse", 1)):
        options = CommOptions(start="torchrun", table=str(path), granularity=granularity)
        assert list(comm_bench.measure(options, None)) == []
        routes = {given[-1].route("all_reduce", 2, 2, "cpu", "float", n) for n in (64, 1 << 20)}
        assert len(routes) == number
    with pytest.raises(ConfigError, match="--granularity coarse needs --table"):
        CommOptions(start="torchrun", granularity="coarse")
