"""A table is written only where the machine is quiet and results are right; sweeps continue.

Options are refused before any rank starts; cells of other code or machines are measured again.
"""

from __future__ import annotations

import json

import pytest

from hires.bench import comm_bench, message_noise, message_sweep
from hires.bench.comm_bench import (
    comm_facts,
    comm_tables,
    judged_table,
    parsed,
    result_of,
    rows_to_resume,
    tune_facts,
    tune_tables,
    write_table,
)
from hires.bench.message_noise import ProgramCounter, disturbance, noise_facts
from hires.bench.message_race import BenchCell
from hires.bench.message_sweep import SweepOptions, applies_to, cells_of, left_s, sizes_of, sweep
from hires.core.errors import ConfigError
from hires.plan.tuning_table import TuningTable
from tests.helpers.bench_rows import row

ORIGIN = {"hardware": {"cpu": "a CPU", "cores": 2}, "time": "2026-01-01", "git": "abc"}
ORIGIN |= {"command": "hires tune comm"}


def judged(rows, noise=0.1, force=False):
    options = {"routes": ["gloo:two_step", "gloo", "shm", "mpi"], "rounds": 5}
    limits = {"noise": noise, "force": force, "write": ""}
    return {**ORIGIN, **judged_table(options, limits, rows)}


def two_sizes(noise=0.0, **more):
    cells = (64, {"shm": 1.0, "mpi": 2.0}), (1 << 20, {"shm": 5.0, "mpi": 2.0})
    return [{**row("all_reduce", size, ways, noise=noise), **more} for size, ways in cells]


def test_table_of_a_quiet_machine_is_written_with_its_use(tmp_path):
    result = judged(two_sizes(0.02))
    assert result["ok"]
    text = write_table(tmp_path, result)
    path = tmp_path / "table.json"
    assert f"hires run comm=mix comm.table={path}" in text
    assert "warning: no rule has send, all_gather, reduce_scatter, all_to_all, " in text
    assert "all_reduce: only 64 B to 1.0 MiB were measured" in text
    table = TuningTable.read(path)
    assert table.default.backend == "gloo"
    assert table.made["noise"] == pytest.approx(0.02)
    assert table.made["machine"] == "a CPU, 2 cores"
    assert "forced" not in table.made
    assert len(table.points) == 4
    assert "mixing gains 25.0% over mpi alone" in tune_tables(result)[1].note


def test_noisy_machine_is_refused_unless_forced(tmp_path):
    result = judged(two_sizes(0.2))
    assert not result["ok"]
    assert "differ by 20.0 %, more than 10 %" in write_table(tmp_path, result)
    assert not [*tmp_path.iterdir()]
    assert "a gain of 40.0 % or more" in "\n".join(tune_facts(result))  # the margin of the rules
    write_table(tmp_path, judged(two_sizes(0.2), force=True))
    assert TuningTable.read(tmp_path / "table.json").made["forced"] is True


def test_table_in_which_one_backend_wins_everywhere_says_so():
    same = [row("all_reduce", size, {"shm": 1.0, "mpi": 2.0}) for size in (64, 4096)]
    assert "mixing gains nothing here" in tune_tables(judged(same))[1].note


def test_wrong_result_is_refused_even_by_force(tmp_path):
    wrong = row("all_reduce", 64, {"shm": 1.0, "mpi": 2.0}, wrong=("shm",))
    result = judged([wrong], force=True)
    assert not result["ok"]
    assert "no table was written: wrong results: shm" in write_table(tmp_path, result)


def test_table_measured_beside_other_programs_is_marked(tmp_path):
    # A steady load slows all rounds alike: their spread of 2 % does not show it.
    result = judged(two_sizes(0.02, ranks_per_node=500, other_programs=900.0))
    assert result["ok"]
    assert "warning: 900 other programs" in write_table(tmp_path, result)
    assert "900 other" in TuningTable.read(tmp_path / "table.json").made["disturbed"]


def noisy(others, noises):
    cells = [row("all_reduce", 64 << i, {"shm": 1.0}, noise=n) for i, n in enumerate(noises)]
    return [{**cell, "other_programs": others} for cell in cells]


def test_disturbance_is_other_programs_without_a_core_or_a_noisy_tenth():
    quiet = (0.05,) * 10
    assert "23 other programs at a time" in disturbance(noisy(23.0, quiet), 2)
    assert disturbance(noisy(23.0, quiet), 64) == ""
    assert disturbance(noisy(0.5, quiet), 2) == ""
    garbage = noisy(0.0, (0.04,) * 17 + (0.6,) * 3)  # the median is 4 %
    assert "a tenth of all medians of rounds differ by 60 % or more" in disturbance(garbage, 2)
    assert "3 rounds hide a disturbed one, use --rounds 5" in noise_facts(garbage, 3)[0]


@pytest.mark.parametrize(("text", "expected"), [("9 9 9 6/126 22\n", 3.0), ("1 1 1 2/9 3\n", 0.0)])
def test_ranks_and_this_program_are_no_others(tmp_path, monkeypatch, text, expected):
    (tmp_path / "loadavg").write_text(text)
    monkeypatch.setattr(message_noise, "_LOAD", tmp_path / "loadavg")
    with ProgramCounter() as programs:
        assert programs.others(2) == expected


def test_cell_is_shown_only_once_it_is_kept(monkeypatch, caplog):
    # Ctrl-C after "1 of 2" must not lose that cell.
    caplog.set_level("INFO")
    cells = [BenchCell("all_reduce", size) for size in (64, 4096)]
    made = [row("all_reduce", cell.num_bytes, {"shm": 1.0}) for cell in cells]
    monkeypatch.setattr(message_sweep, "stream_ranks", lambda *_, **__: iter(made))
    where, rows, shown = SweepOptions("torchrun", (), "cpu", (2,), 5, 0.2, 60.0), [], []
    for _ in sweep(where, cells, ["shm"], rows):
        shown.append((len(rows), len(caplog.records)))
    assert shown == [(1, 0), (2, 1)]
    assert "1 of 2: all_reduce 64 B" in caplog.text
    assert list(sweep(where, cells, ["shm"], rows)) == []  # all are there


def test_rows_that_were_measured_alike_are_kept():
    options, kept = {"rounds": 5}, {"options": {"rounds": 5}, "rows": two_sizes()}
    assert rows_to_resume(kept, options) == two_sizes()
    assert rows_to_resume({**kept, "options": {"rounds": 6}}, options) == []
    assert rows_to_resume(None, options) == []


def test_start_of_the_ranks_is_no_part_of_what_is_left():
    # 10 s until the first cell, 2 s for each one after it.
    assert left_s(10.0, 10.0, 1, 5) is None
    assert left_s(12.0, 10.0, 2, 5) == 6.0
    assert left_s(18.0, 10.0, 5, 5) == 0.0


def test_wrong_results_are_named_and_have_no_number():
    rows = [row("reduce", 64, {"mpi": 1.0, "gloo": 2.0}, wrong=("mpi",))]
    for one in rows[0]["ways"].values():
        one |= {"count": 3, "p99_s": 3.0}
    result = result_of({"start": "openmpi", "rounds": 5}, rows)
    assert not result["ok"]
    assert "WRONG: mpi: reduce 64 B" in "\n".join(comm_facts(result))
    medians, fastest = comm_tables(result)
    assert medians.rows[0]["mpi"] == "WRONG"
    assert fastest.rows[0]["way"] == "gloo"


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
        ("gloo:direct", "all_gather_into_tensor", 64, 2, True),
        ("gloo:direct", "all_gather_into_tensor", 8 << 20, 2, False),
        ("raw:gloo", "gather", 64, 2, True),
    ],
)
def test_algorithms_run_where_they_differ_from_their_backend(
    way, operation, num_bytes, near, expected
):
    cell = {"operation": operation, "num_bytes": num_bytes, "ranks": 4, "ranks_per_node": near}
    assert applies_to(way, cell) is expected


@pytest.mark.parametrize(
    ("words", "tunes", "message"),
    [
        (["--sizes", "4..8xa"], False, "--sizes 4..8xa is no size"),
        (["--sizes", "64KiB..4"], False, "write the smaller one first"),
        (["--only", "all_redcue"], False, "--only all_redcue: unknown 'all_redcue'; did you mean"),
        (["--ranks", "1"], False, "--ranks 1: it must be numbers above 1"),
        (["--rounds", "0"], False, "--rounds 0: it must be a whole number above 0"),
        (["--start", "mpich3"], False, "--start mpich3 is unknown"),
        (["--routes", "table"], False, "--routes table needs --table FILE"),
        (["--granularity", "coarse"], False, "--granularity coarse needs --table FILE"),
        (["--routes", "gloo,raw:gloo"], True, "raw:gloo is no route"),
        (["--routes", "gloo:two_step"], True, "a table needs a backend alone"),
        (["--routes", "gluo"], True, "route 'gluo'"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, tunes, message):
    words = [*words, *(["--start", "torchrun"] if "--start" not in words else [])]
    with pytest.raises(ConfigError) as error:
        parsed("hires bench comm", words, tunes)
    assert message in str(error.value)


def test_quick_keeps_sizes_that_were_named():
    quick = ["--quick", "--start", "torchrun"]
    assert parsed("hires bench comm", [*quick, "--sizes", "8"], tunes=False).sizes == (8,)
    assert len(parsed("hires bench comm", quick, tunes=False).sizes) == 5
    assert sizes_of("1KiB..64KiBx8") == (1024, 8192, 65536)


@pytest.mark.dist
def test_ranks_measure_messages_and_write_a_table(tmp_path, capsys):
    words = [
        "--start",
        "torchrun",
        "--sizes",
        "16",
        "--only",
        "all_reduce,latency",
        "--rounds",
        "2",
    ]
    words += ["--seconds", "1e-4", "--json", "--out", str(tmp_path)]
    code = comm_bench.tune([*words, "--routes", "gloo,shm", "--force"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert {row["operation"] for row in result["rows"]} == {"latency", "all_reduce"}
    assert all(one["wrong"] == 0 for row in result["rows"] for one in row["ways"].values())
    table = TuningTable.read(tmp_path / "table.json")
    assert table.route("all_reduce", 2, 2, "cpu", "float", 16).backend in ("gloo", "shm")


@pytest.mark.mpi
def test_every_backend_and_baseline_is_right_under_an_mpi(mpi, capsys):
    words = ["--sizes", "16,256KiB", "--modes", "blocking", "--quick", "--seconds", "1e-6"]
    words += ["--start", mpi, "--ranks", "2,3", "--timeout", "250", "--json"]
    assert comm_bench.bench(words) == 0
    result = json.loads(capsys.readouterr().out)
    ways = {way for row in result["rows"] for way, one in row["ways"].items() if "p50_s" in one}
    assert ways >= {"gloo", "mpi", "shm", "raw:gloo", "raw:mpi4py", "mpi:direct", "gloo:direct"}
    assert not result["wrong"]
