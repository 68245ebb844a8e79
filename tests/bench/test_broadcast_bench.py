"""Broadcasts of codes are right at every way, and links between stand-ins for machines are real."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from hires.bench import broadcast_bench, comm_bench
from hires.bench.messages import BenchCell
from hires.cli.verbs import verb_bench
from hires.core.errors import ConfigError
from tests.helpers.bench_jobs import forked, rows_of

CHAIN = "gloo:segmented:1KiB"


def task_of(*words):
    args = verb_bench.COMM.read(["comm", "--broadcast", "--start", "torchrun", *words])
    return verb_bench.message_task(args, "broadcast", "broadcast")


@pytest.mark.dist
def test_every_way_of_codes_is_right_on_all_ranks():
    ways = broadcast_bench.ways_of(task_of("--routes", f"shm,{CHAIN}"), False)
    assert ways[1:4] == [CHAIN, f"{CHAIN}+bf16", f"{CHAIN}+bf16@hops"]
    cells = [BenchCell("broadcast", size) for size in (600, 100_000)]
    measured = [*forked("hires.bench.comm_bench:run_cells", 3, 60, cells, 1, 1e-9, "cpu", ways)]
    for rows, expected in zip(measured, ({*ways} - {CHAIN}, {*ways}), strict=True):
        assert {row["name"] for row in rows if row["ok"] and "step_s" in row} == expected, rows


def test_page_compares_codes_round_by_round_with_every_other_way(monkeypatch):
    def measured(*_, **__):
        rows = rows_of("broadcast", 2**22, {"mpi": 4.0, f"{CHAIN}+int8": 2.0})
        for row in rows:
            row["rounds_s"] = [row["step_s"]["median"]] * 3
            row["step_s"] |= {"p10": 1.0, "p90": 8.0}
        yield rows

    monkeypatch.setattr(comm_bench, "stream_ranks", measured)
    [result] = broadcast_bench.measure(task_of("--sizes", "4MiB"))
    words = f"4.0 MiB, {CHAIN}+int8 beside mpi 2.00 times (2.00 to 2.00), -50.0 %"
    assert any(words in fact for fact in result["facts"])
    [table] = broadcast_bench.tables(result)
    assert table.rows[0]["mpi"] == "4e+03 (1e+03-8e+03)"


@pytest.mark.parametrize(
    ("words", "message"),
    [("10", "--link 10 is no rate; write 10Gbit"), ("10Gbit", "torchrun cannot start ranks there")],
)
def test_links_that_cannot_be_are_refused(words: str, message: str):
    for module in (comm_bench, broadcast_bench):
        with pytest.raises(ConfigError, match=message):
            next(module.measure(task_of("--link", words)))


@pytest.mark.mpi
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc")
def test_ranks_on_links_are_on_machines_of_their_own_and_leave_nothing(mpi: str):
    if mpi != "openmpi":
        pytest.skip("only Open MPI starts ranks in name spaces")
    words = ["--link", "1Gbit", "--sizes", "64KiB", "--rounds", "1", "--routes", "gloo,mpi"]
    args = verb_bench.COMM.read(["comm", "--only", "broadcast", "--start", mpi, *words])
    *_, result = comm_bench.measure(verb_bench.message_task(args, "comm", "comm"))
    [rows] = result["groups"].values()
    assert [(row["name"], row["ok"], row["ranks_per_node"]) for row in rows] == [
        ("gloo", True, 1),
        ("mpi", True, 1),
    ]
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"hires{os.getpid() % 10**6}-" not in spaces.stdout
