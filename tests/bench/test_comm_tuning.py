"""Is a table written only where the machine is quiet and the results are right, with its use?"""

from __future__ import annotations

import pytest

from hires.bench.comm_bench import CommOptions
from hires.bench.comm_tuning import BENCHMARK, judged_table, routes_of, write_table
from hires.core.errors import ConfigError
from hires.plan.tuning_table import TuningTable
from tests.helpers.bench_rows import row

ORIGIN = {
    "hardware": {"cpu": "a CPU", "cores": 2, "memory": None},
    "time": "2026-01-01",
    "git": "abc",
    "command": "hires tune comm",
}


def judged(rows, noise=0.1, force=False):
    shown = {"routes": ["gloo", "shm", "mpi"], "rounds": 5}
    result = judged_table(shown, {"noise": noise, "force": force, "write": ""}, rows)
    return {**ORIGIN, **result}


def rows(noise):
    return [
        row("all_reduce", 64, {"shm": 1.0, "mpi": 2.0}, noise=noise),
        row("all_reduce", 1 << 20, {"shm": 5.0, "mpi": 2.0}, noise=noise),
    ]


def test_table_of_a_quiet_machine_is_written_with_its_use(tmp_path):
    result = judged(rows(0.02))
    assert result["ok"]
    text = write_table(tmp_path, result)
    path = tmp_path / "table.json"
    assert f"hires run comm=mix comm.table={path}" in text
    table = TuningTable.read(path)
    assert table.made["noise"] == pytest.approx(0.02)
    assert table.made["machine"] == "a CPU, 2 cores"
    assert "forced" not in table.made
    assert len(table.points) == 4


def test_operations_without_a_rule_are_named(tmp_path):
    result = judged(rows(0.0))
    text = write_table(tmp_path, result)
    assert "warning: no rule has send, all_gather, reduce_scatter, all_to_all, " in text
    assert "barrier, which " in text


def test_noisy_machine_is_refused_with_its_spread_and_remedy(tmp_path):
    result = judged(rows(0.2))
    assert not result["ok"]
    text = write_table(tmp_path, result)
    assert "differ by 20.0 %, more than 10 %" in text
    assert "--rounds 10, or --force" in text
    assert not [*tmp_path.iterdir()]


def test_table_measured_beside_other_programs_is_marked(tmp_path):
    # A steady load slows all rounds alike: their spread of 2 % does not show it.
    busy = [{**one, "ranks_per_node": 500, "other_programs": 900.0} for one in rows(0.02)]
    result = judged(busy)
    assert result["ok"]
    assert "900 other programs at a time shared" in BENCHMARK.text(result)
    assert "warning: 900 other programs" in write_table(tmp_path, result)
    assert "900 other" in TuningTable.read(tmp_path / "table.json").made["disturbed"]


def test_sizes_that_were_not_measured_are_named(tmp_path):
    text = write_table(tmp_path, judged(rows(0.0)))
    assert "all_reduce: only 64 B to 1.0 MiB were measured" in text
    whole = [*rows(0.0), row("all_reduce", 64 << 20, {"shm": 1.0, "mpi": 2.0})]
    assert "were measured" not in write_table(tmp_path, judged(whole))


def test_forced_table_of_a_noisy_machine_is_marked(tmp_path):
    result = judged(rows(0.2), force=True)
    assert result["ok"]
    write_table(tmp_path, result)
    assert TuningTable.read(tmp_path / "table.json").made["forced"] is True


def test_wrong_result_is_refused_even_by_force(tmp_path):
    wrong = row("all_reduce", 64, {"shm": 1.0, "mpi": 2.0}, wrong=("shm",))
    result = judged([wrong], force=True)
    assert not result["ok"]
    assert "no table was written: wrong results: shm" in write_table(tmp_path, result)


def test_gain_of_mixing_is_stated():
    assert "mixing gains 25.0% over mpi alone" in judged(rows(0.0))["verdict"]


def test_table_in_which_one_backend_wins_everywhere_says_so():
    same = [row("all_reduce", size, {"shm": 1.0, "mpi": 2.0}) for size in (64, 4096)]
    assert "mixing gains nothing here" in BENCHMARK.text(judged(same))


def test_tables_fit_a_narrow_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = BENCHMARK.text(judged(rows(0.0)))
    assert "mpi" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "Rules" in text


def test_baselines_are_no_routes():
    with pytest.raises(ConfigError, match="raw:gloo is no route"):
        routes_of("--routes", "gloo,raw:gloo")
    with pytest.raises(ConfigError, match=r"route 'gluo'"):
        routes_of("--routes", "gluo")


def test_way_of_a_table_needs_a_table():
    with pytest.raises(ConfigError, match="--ways table needs --table FILE"):
        CommOptions(ways=("table",))


@pytest.mark.parametrize(
    ("name", "why"), [("", "it is a folder, and no file in it"), ("no.json", "No such file")]
)
def test_table_that_cannot_be_read_is_no_run_folder(tmp_path, name, why):
    with pytest.raises(ConfigError, match=f"cannot read .*{why}.*; make the table again") as error:
        TuningTable.read(tmp_path / name)
    assert "run folder" not in str(error.value)


def test_damaged_table_is_made_again(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"damaged .*; make the table again \(`hires tune comm`"):
        TuningTable.read(path)
