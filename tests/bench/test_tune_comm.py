"""Rules follow the fastest route, do not flap within the noise, and hold every message.

A table is written only where the machine is quiet and results are right.
"""

from __future__ import annotations

import json

import pytest

from hires.bench import tune_comm
from hires.bench.bench_main import run
from hires.bench.tune_comm import (
    case_of,
    choose,
    finish,
    judged_table,
    points_of,
    rules_of,
)
from hires.cli.verbs import verb_tune
from hires.cli.verbs.verb_bench import message_task
from hires.core.errors import ConfigError
from hires.plan.routes import Route
from hires.plan.tuning_table import Case, TuningTable
from tests.helpers.bench_jobs import rows_of

ORIGIN = {"hardware": {"cpu": "a CPU", "cores": 2}, "time": "2026-01-01", "git": "abc"}
ORIGIN |= {"command": "hires tune comm"}


def backend(table, num_bytes=64, ranks=2, near=True, kind="float"):
    return table.route(Case("all_reduce", ranks, near, "cpu", kind, num_bytes)).backend


def tuned(*cells):
    points = points_of({"all": [row for rows in cells for row in rows]})
    return TuningTable(rules_of(points, 0.02), "gloo", points)


def test_neighbouring_sizes_do_not_flap_within_the_margin():
    medians = [{"a": 1.00, "b": 1.03}, {"a": 1.03, "b": 1.00}, {"a": 1.00, "b": 1.03}]
    assert choose(medians, 0.05) == ["a", "a", "a"]
    assert choose(medians, 0.01) == ["a", "b", "a"]
    assert choose([{"a": 1.0, "b": 1.1}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.04}], 0.05) == [
        *"abb"  # a large gain at a single size changes the route, a small one not back
    ]


def test_rules_hold_every_size_and_change_between_two_measured_ones():
    rows = [
        rows_of("all_reduce", size, {"shm": 1 if size < 4096 else 9, "mpi:direct": 4})
        for size in (1024, 4096, 16384)
    ]
    table = tuned(*rows)
    bounds = [(rule.min_bytes, rule.max_bytes) for rule in table.rules]
    assert bounds == [(0, 2048), (2049, None)]
    found = [backend(table, num_bytes) for num_bytes in (0, 2048, 2049, 1 << 40)]
    assert found == ["shm", "shm", "mpi", "mpi"]
    assert table.route(Case("reduce", 2, True, "cpu", "float", 8)) == Route("gloo")


def test_operation_without_a_common_size_has_one_route_by_the_sum():
    operation = "all_to_all_single"
    # mpi is faster at two sizes of three, and in the product of all slow-downs; gloo in the sum.
    rows = [
        rows_of(operation, 64, {"gloo": 0.2, "mpi": 0.1, "mpi:direct": 0.01}),
        rows_of(operation, 1024, {"gloo": 0.4, "mpi": 0.2, "mpi:direct": 0.01}),
        rows_of(operation, 1 << 20, {"gloo": 4.0, "mpi": 5.0}),
    ]
    [rule] = tuned(*rows).rules
    assert (rule.min_bytes, rule.max_bytes, rule.route) == (0, None, "gloo")


def test_rules_hold_up_to_the_next_number_of_ranks_within_a_node_or_between_nodes():
    table = tuned(
        *(rows_of("all_reduce", 64, {w: 1}, n, near=9) for n, w in ((2, "shm"), (4, "mpi")))
    )
    assert [backend(table, ranks=n) for n in (2, 3, 4, 99)] == ["shm", "shm", "mpi", "mpi"]
    ways = (4, "shm"), (2, "mpi")
    table = tuned(*(rows_of("all_reduce", 64, {way: 1}, 4, near=near) for near, way in ways))
    assert [backend(table, ranks=4, near=near) for near in (True, False)] == ["shm", "mpi"]


def test_class_that_was_not_measured_follows_the_first():
    table = tuned(
        rows_of("all_reduce", 64, {"shm": 1, "mpi": 2}),
        rows_of("all_reduce", 64, {"mpi": 1}, dtype="int64"),
    )
    found = [backend(table, kind=kind) for kind in ("float", "integer", "half")]
    assert found == ["shm", "mpi", "shm"]


def test_wrong_results_and_raw_libraries_are_no_routes_and_messages_are_of_two_ranks():
    medians = {"raw:gloo": 1e-9, "table": 1e-9, "mpi": 1e-6, "gloo": 1e-3}
    [rule] = tuned(rows_of("reduce", 64, medians, wrong=("mpi",))).rules
    assert rule.route == "gloo"
    found = [case_of(rows_of("latency", 64, {"shm": 1}, 4, near=near)[0])[:3] for near in (4, 2)]
    assert found == [("send", 2, True), ("send", 2, False)]


def judged(rows, force=False):
    return {**ORIGIN, **judged_table({"all_reduce": rows}, "gloo", 0.1, force)}


def two_sizes(noise, wrong=()):
    cells = (64, {"shm": 1.0, "mpi": 2.0}), (1 << 20, {"shm": 5.0, "mpi": 2.0})
    each = [rows_of("all_reduce", size, ways, noise=noise, wrong=wrong) for size, ways in cells]
    return [row for rows in each for row in rows]


def test_table_of_a_quiet_machine_is_written_with_its_use(tmp_path):
    result = judged(two_sizes(0.02))
    assert result["ok"]
    text, path = finish(tmp_path, result), tmp_path / "table.json"
    assert f"hires run comm=mix comm.table={path}" in text
    table = TuningTable.read(path)
    assert table.default == "gloo"
    assert table.made["noise"] == pytest.approx(0.02)
    assert table.made["machine"] == "a CPU, 2 cores"
    assert "forced" not in table.made
    assert len(table.points) == 4


def test_noisy_machine_is_refused_unless_forced_and_its_table_is_marked(tmp_path):
    result = judged(two_sizes(0.2))
    assert not result["ok"]
    assert "differ by 20.0 %, more than 10 %" in finish(tmp_path, result)
    assert not [*tmp_path.iterdir()]
    assert "a gain of 40.0 % or more" in "\n".join(result["facts"])  # margin of the rules
    finish(tmp_path, judged(two_sizes(0.6), force=True))
    assert TuningTable.read(tmp_path / "table.json").made["forced"] is True
    wrong = judged(two_sizes(0.0, wrong=("shm",)), force=True)
    assert "no table was written: wrong results: shm" in finish(tmp_path, wrong)


def task_of(*words):
    words = ["comm", "--start", "torchrun", *words]
    return message_task(verb_tune.PARSER.read(words), "tune", "tuning")


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ("gloo,raw:gloo", "raw:gloo is no route of hires.comm"),
        ("gloo:direct", "a table needs a backend alone"),  # was a StopIteration after the sweep
    ],
)
def test_routes_of_no_table_are_refused_before_any_rank_starts(routes, message):
    with pytest.raises(ConfigError, match=message):
        list(tune_comm.measure(task_of("--routes", routes, "--only", "barrier")))


def test_measured_table_is_written_by_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune_comm, "sweep", lambda *_: iter([{"all_reduce": two_sizes(0.0)}]))
    task = task_of("--json", "--out", str(tmp_path), "--routes", "gloo:direct,gloo,shm")
    assert run(task, tune_comm) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    table = TuningTable.read(tmp_path / "table.json")
    assert (table.default, backend(table)) == ("gloo", "shm")


def test_what_a_noisy_machine_measured_is_taken_by_force(tmp_path, capsys, monkeypatch):
    befores = []

    def sweep(task, *_):
        befores.append(task["before"])
        yield task["before"] or {"all_reduce": two_sizes(0.2)}

    monkeypatch.setattr(tune_comm, "sweep", sweep)
    words = ["--out", str(tmp_path), "--routes", "gloo,shm"]
    assert run(task_of(*words), tune_comm) == 1
    assert "The same command with --force at its end takes what was" in capsys.readouterr().out
    assert not (tmp_path / "table.json").exists()
    for more in ([], ["--force"]):  # without it the same command measures again
        task = task_of(*words, *more)
        task["command"] += " --force" if more and "--force" not in task["command"] else ""
        assert run(task, tune_comm) == (0 if more else 1)
    assert [len(before) for before in befores] == [0, 0, 1]
    assert TuningTable.read(tmp_path / "table.json").made["forced"] is True
