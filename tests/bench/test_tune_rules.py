"""Rules follow the fastest route, do not flap within the noise, and hold every message."""

from __future__ import annotations

import math
import random

import pytest

from hires.bench.message_noise import noise_of
from hires.bench.tune_rules import (
    case_of,
    choose,
    rules_of,
    series_of,
    sums,
    table_of,
)
from hires.plan.routes import Route
from hires.plan.tuning_table import TuningTable
from tests.helpers.bench_rows import row


def test_fastest_route_wins_where_the_gain_is_clear():
    medians = [{"shm": 1, "mpi": 4}, {"shm": 2, "mpi": 3}, {"shm": 9, "mpi": 5}]
    assert choose(medians, 0.02) == ["shm", "shm", "mpi"]


def test_neighbouring_sizes_do_not_flap_within_the_margin():
    medians = [{"a": 1.00, "b": 1.03}, {"a": 1.03, "b": 1.00}, {"a": 1.00, "b": 1.03}]
    assert choose(medians, 0.05) == ["a", "a", "a"]
    assert choose(medians, 0.01) == ["a", "b", "a"]


def test_single_size_with_a_large_gain_has_a_rule_of_its_own():
    medians = [{"a": 1.0, "b": 1.1}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.1}]
    assert choose(medians, 0.05) == ["a", "b", "a"]


def test_each_route_is_within_twice_the_margin_of_the_fastest():
    # Why a search for layouts looks for no other routes: changing one costs two margins at most.
    draw, margin = random.Random(5), 0.04
    for _ in range(200):
        medians = [{way: draw.uniform(1, 1.2) for way in "abc"} for _ in range(8)]
        for route, measured in zip(choose(medians, margin), medians, strict=True):
            behind = math.log(measured[route] / min(measured.values()))
            assert behind <= 2 * margin + 1e-12


def test_route_that_lacks_a_size_is_left_there():
    assert choose([{"shm": 1.0, "mpi": 2.0}, {"mpi": 2.0}], 10.0) == ["mpi", "mpi"]
    assert choose([{"shm": 1.0}, {"mpi": 2.0}], 10.0) == ["shm", "mpi"]


def test_rules_hold_every_size_and_change_between_two_measured_ones():
    rows = [
        row("all_reduce", size, {"shm": 1 if size < 4096 else 9, "mpi:two_step": 4})
        for size in (1024, 4096, 16384)
    ]
    table = table_of(rows, {}, "gloo")
    assert [rule.num_bytes for rule in table.rules] == [(0, 2048), (2049, math.inf)]
    for num_bytes, expected in ((0, "shm"), (2048, "shm"), (2049, "mpi"), (1 << 40, "mpi")):
        route = table.route("all_reduce", 2, 2, "cpu", "float", num_bytes)
        assert route.backend == expected
    assert table.route("reduce", 2, 2, "cpu", "float", 8) == Route("gloo")


@pytest.mark.parametrize("operation", ["gather", "scatter", "all_to_all_single"])
def test_operation_without_a_common_size_has_one_route_by_the_sum(operation):
    # mpi is faster at two sizes of three, and in the product of all slow-downs; gloo in the sum.
    rows = [
        row(operation, 64, {"gloo": 0.2, "mpi": 0.1, "mpi:direct": 0.01}),
        row(operation, 1024, {"gloo": 0.4, "mpi": 0.2, "mpi:direct": 0.01}),
        row(operation, 1 << 20, {"gloo": 4.0, "mpi": 5.0}),
    ]
    table = table_of(rows, {}, "shm")
    [rule] = table.rules
    assert rule.num_bytes == (0, math.inf)
    assert rule.route == Route("gloo")
    assert "bytes" not in rule.to_dict()
    mixed, alone, _ = sums(rows, table)
    assert mixed == pytest.approx(alone["gloo"]) == pytest.approx(4.6)


def test_cells_that_lack_the_route_of_the_table_are_in_no_sum():
    rows = [
        row("gather", 64, {"gloo": 2.0, "mpi": 1.0}),
        row("gather", 128, {"gloo": 2.0}),
        row("gather", 256, {"mpi": 1.0}),
        row("gather", 512, {"mpi": 1.0}),
    ]
    mixed, alone, used = sums(rows, table_of(rows, {}, "gloo"))
    assert mixed == 3.0
    assert used == ["mpi"]
    assert alone == {"mpi": 3.0}


def test_table_can_be_written_and_read(tmp_path):
    rows = [
        row(name, size, {"shm": 1e-6 * size, "gloo": 1e-4}, ranks)
        for name in ("latency", "all_reduce", "all_gather_into_tensor", "gather", "barrier")
        for ranks in (2, 4)
        for size in ((16, 1024) if name != "barrier" else (16,))
    ]
    table = table_of(rows, {"noise": 0.01}, "gloo")
    table.write(tmp_path / "table.json")
    same = TuningTable.read(tmp_path / "table.json")
    assert same.rules == table.rules
    assert same.points == table.points
    assert len(same.points) == 2 * sum(len(one["ways"]) for one in rows) // 2
    assert same.route("send", 2, 2, "cpu", "bytes", 16) == Route("shm", "message")


def test_rules_hold_up_to_the_next_number_of_ranks():
    rows = [
        row("all_reduce", 64, {way: 1}, ranks, near=9) for ranks, way in ((2, "shm"), (4, "mpi"))
    ]
    table = table_of(rows, {}, "gloo")
    found = [table.route("all_reduce", n, n, "cpu", "float", 64).backend for n in (2, 3, 4, 99)]
    assert found == ["shm", "shm", "mpi", "mpi"]


def test_ranks_spread_over_nodes_have_rules_of_their_own():
    rows = [row("all_reduce", 64, {way: 1}, 4, near=near) for near, way in ((4, "shm"), (2, "mpi"))]
    table = table_of(rows, {}, "gloo")
    found = [table.route("all_reduce", 4, near, "cpu", "float", 64).backend for near in (4, 2, 1)]
    assert found == ["shm", "mpi", "gloo"]


def test_class_that_was_not_measured_follows_the_first():
    rows = [
        row("all_reduce", 64, {"shm": 1, "mpi": 2}),
        row("all_reduce", 64, {"mpi": 1}, dtype="int64"),
    ]
    table = table_of(rows, {}, "gloo")
    found = [
        table.route("all_reduce", 2, 2, "cpu", kind, 64).backend
        for kind in ("float", "integer", "half")
    ]
    assert found == ["shm", "mpi", "shm"]


def test_wrong_results_and_raw_libraries_are_no_routes():
    medians = {"raw:c": 1e-9, "table": 1e-9, "mpi": 1e-6, "gloo": 1e-3}
    [rule] = rules_of(series_of([row("reduce", 64, medians, wrong=("mpi",))]), 0.02)
    assert rule.route == Route("gloo")


def test_noise_is_the_typical_one_and_widens_the_margin():
    rows = [
        row("all_reduce", 64 << i, {"shm": one, "mpi": 1.0}, noise=0.1)
        for i, one in enumerate((0.95, 1.05, 0.95))
    ]
    assert noise_of(rows) == pytest.approx(0.1)
    assert len(table_of(rows, {}, "gloo").rules) == 1


def test_sums_compare_the_table_with_each_backend_that_has_all_cells():
    rows = [
        row("all_reduce", 64, {"shm": 1.0, "mpi": 3.0, "cma": 9.0}),
        row("all_reduce", 1 << 20, {"shm": 8.0, "mpi": 2.0}),
    ]
    mixed, alone, used = sums(rows, table_of(rows, {}, "gloo"))
    assert mixed == 3.0
    assert alone == {"mpi": 5.0, "shm": 9.0}
    assert used == ["shm", "mpi"]


def test_messages_lie_between_two_ranks_in_every_world():
    one_node, two_nodes = (case_of(row("latency", 64, {"shm": 1}, 4, near=n)) for n in (4, 2))
    assert one_node[:3] == ("send", 2, 2)
    assert two_nodes[:3] == ("send", 2, 1)
