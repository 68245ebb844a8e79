"""Do the words of several nodes become the right findings?"""

from __future__ import annotations

import pytest

import hires
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.store.provenance import collect
from hires.launcher.doctor_check import ask, node_checks

HERE = collect()


def facts(rank: int, **more):
    told = {key: HERE[key] for key in ("git", "python")}
    told |= {"rank": rank, "node": f"n{rank}", "host": f"h{rank}", "hires": hires.__version__}
    told |= {"torch": HERE["torch"], "gpus": [], "apart": [], "bytes_per_s": 1e9}
    return {**told, "time": 1000.0, "written": 1000.0, **more}


def met(rank: int, **more):
    told = {"rank": rank, "address": "10.0.0.1", "port": 12345, "interface": "ib0"}
    return {**told, "ahead_s": 0.001, "unseen": [], "sum_s": 0.01, "nccl": None, **more}


def checks(first=None, second=None, met_second=None, here_s=0.0, **met_first):
    config = RunConfig(launcher=LauncherConfig("slurm", nodes=2))
    together = [met(0, **met_first), met(1, **(met_second or {}))]
    alone = [facts(0, **(first or {})), facts(1, **(second or {}))]
    return {check.name: check for check in node_checks(config, alone, together, here_s)}


def test_program_that_is_missing_and_one_that_takes_too_long_differ():
    assert ask("no-such-program")[0] == 127
    assert ask("sleep", "9", most_s=0.1)[0] == 124


def test_nodes_that_fit_together_are_all_ok():
    found = checks()
    assert {check.state for check in found.values()} == {"ok"}
    assert {check.where for check in found.values()} == {"job"}
    assert "met at 10.0.0.1:12345, talk over ib0" in found["network"].text


@pytest.mark.parametrize(
    ("name", "state", "told", "change"),
    [
        ("versions", "failed", "n1 has hires 9.9", {"second": {"hires": "9.9"}}),
        ("versions", "failed", "n1 has torch 1.0", {"second": {"torch": "1.0"}}),
        ("versions", "failed", "n0 has git other", {"first": {"git": "other"}}),
        ("gpus", "warning", "n0: 0, n1: 1", {"second": {"gpus": ["H200"]}}),
        ("disk", "warning", "from n1", {"second": {"bytes_per_s": 1e6}}),
        ("clock", "warning", "n1 is -7.0 s from n0", {"met_second": {"ahead_s": -7.0}}),
        ("clock", "warning", "n0 is +60.0 s from this", {"first": {"time": 1060.0}}),
        ("shared", "failed", "n1 does not see files of n0", {"met_second": {"unseen": [0]}}),
        ("network", "failed", "of the machine itself", {"address": "127.0.0.1"}),
        ("network", "failed", "a sum came out wrong", {"met_second": {"sum_s": None}}),
        ("network", "warning", "takes 1.00 s", {"sum_s": 1.0}),
        ("nccl", "failed", "no route", {"nccl": {"error": "no route"}}),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(name, state, told, change):
    found = checks(**change)
    assert found[name].state == state
    assert told in found[name].text
    assert found[name].remedy
    assert [check.name for check in found.values() if check.state != "ok"] == [name]


def test_clock_of_the_file_system_alone_is_no_finding():
    assert checks(first={"written": 940.0}, here_s=-60.0)["clock"].state == "ok"


def test_nodes_of_one_machine_may_meet_at_the_loopback():
    found = checks(first={"host": "h"}, second={"host": "h"}, address="127.0.0.1")
    assert found["network"].state == "ok"
    assert "all nodes are one machine" in found["network"].text


def test_rank_that_never_met_the_others_is_missed():
    config = RunConfig(launcher=LauncherConfig("slurm", nodes=2))
    found = {c.name: c for c in node_checks(config, [facts(0), facts(1)], [met(0)], 0.0)}
    assert found["network"].state == "failed"
    assert "1 of 2 ranks" in found["network"].text


def test_nobody_who_spoke_is_no_finding_of_its_own():
    assert node_checks(RunConfig(), [], [], 0.0) == []
