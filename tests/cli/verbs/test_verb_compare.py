"""Does ``hires compare`` find what it is asked for, and end with the right code?"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from hires.cli.verbs import verb_compare
from hires.report.compare.metrics import METRICS
from tests.helpers.compared_runs import compared_run, failed_run

RESULTS = Path("results")


def steps(factor=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return list(factor * 0.5 * np.exp(0.01 * rng.normal(size=30)))


@pytest.fixture
def campaigns(hires):
    """Three campaigns of two points: as it was, the same again, and a tenth slower."""
    for name, factor in (("before", 1.0), ("same", 1.0), ("slow", 1.1)):
        for batch in (2, 4):
            seed = len(name) + batch
            compared_run(RESULTS, [steps(factor, seed)], campaign=name, batch=batch)


@pytest.mark.usefixtures("campaigns")
class TestCampaigns:
    def test_regression_ends_with_4(self, hires):
        answer = hires("compare", "before", "slow")
        assert answer.code == 4, answer.err
        assert answer.out.count("slower (worse)") == 2
        assert "overall throughput: slower: -9" in answer.out
        assert "2000 resamples, seed 0" in answer.out
        assert "blocks of" in answer.out

    def test_equal_and_faster_end_with_0(self, hires):
        assert hires("compare", "before", "same").code == 0
        answer = hires("compare", "slow", "before")
        assert (answer.code, answer.out.count("faster")) == (0, 3)
        assert hires("compare", "before", "slow", "--tolerance", "20%").code == 0
        assert hires("compare", "before", "slow", "--metric", "memory,loss").code == 0

    def test_tolerance_is_taken_as_the_help_writes_it(self, hires):
        for words in (["--tolerance", "-20%,+5%"], ["--tolerance=-20%,+5%"]):
            answer = hires("compare", *words, "before", "slow")
            assert (answer.code, "-20%,+5%" in answer.out) == (0, True)
        assert hires("compare", "before", "slow", "--tolerance").code == 2
        assert hires("compare", "before", "slow", "--json", "-5%").code == 2

    def test_json_holds_everything(self, hires):
        answer = hires("compare", "before", "slow", "--json", "--metric", "throughput,step_time")
        told = json.loads(answer.out)
        assert (answer.code, told["regression"], told["seed"]) == (4, True, 0)
        assert [point["status"] for point in told["points"]] == ["worse"] * 4
        assert [overall["metric"] for overall in told["overall"]] == ["throughput", "step_time"]
        assert told["points"][0]["unit"] == "img/s"
        assert told["points"][0]["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
        again = json.loads(hires("compare", "before", "slow", "--json", "--seed", "0").out)
        assert again["points"] == told["points"][:2]

    def test_junit_is_written(self, hires):
        assert hires("compare", "before", "slow", "--junit", "out.xml").code == 4
        [suite] = ElementTree.parse("out.xml").getroot()
        assert (suite.get("tests"), suite.get("failures")) == ("3", "3")
        assert hires("compare", "before", "slow", "--junit", "none/out.xml").code == 2

    def test_references_are_written_and_held(self, hires):
        made = hires(
            "compare", "before", "--write-reference", "ref.yaml", "--tolerance=-5%,+15%",
            "--metric", "throughput,memory",
        )  # fmt: skip
        assert made.out == "ref.yaml: 4 written, 4 in all\n"
        entries = yaml.safe_load(Path("ref.yaml").read_text())["references"]
        assert entries[0]["tolerance"] == ["-5%", "+15%"]
        assert entries[0]["cluster"] == "node1"
        for words in (["--reference", "ref.yaml", "same"], ["same", "ref.yaml"]):
            assert hires("compare", *words).code == 0
        answer = hires("compare", "slow", "--reference", "ref.yaml", "--junit", "out.xml")
        assert answer.code == 4
        assert "slower (worse)" in answer.out
        assert "-5%,+15%" in answer.out

    def test_cluster_of_a_reference_is_chosen(self, hires):
        words = ["compare", "before", "--write-reference", "ref.yaml", "--cluster"]
        assert hires(*words, "gpu*").code == hires(*words, "node*").code == 0
        entries = yaml.safe_load(Path("ref.yaml").read_text())["references"]
        assert [entry["cluster"] for entry in entries] == ["gpu*"] * 2 + ["node*"] * 2
        assert hires("compare", "same", "--reference", "ref.yaml").code == 0

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["before"], "needs two runs, campaigns or references: A and B"),
            (["before", "same", "slow"], "needs two runs"),
            (["before", "same", "--reference", "ref.yaml"], "needs one run or campaign"),
            (["before", "nothing"], "'nothing' is no campaign and no run"),
            (["before", "same", "--metric", "troughput"], "did you mean throughput?"),
            (["before", "same", "--metric", ","], "--metric names none"),
            (["before", "same", "--tolerance", "much"], "write 5%"),
            (["before", "same", "--resamples", "3"], "100 or more"),
            (["before", "same", "--seed", "-3"], "--seed"),
            (["before", "same", "--cluster", "x"], "--write-reference"),
            (["before", "none.yaml"], "none.yaml cannot be read: No such file"),
            (["before", "x.yaml", "--tolerance", "1%"], "has tolerances of its own"),
            (["before", "same", "--write-reference", "x.yaml"], "takes one run or campaign"),
        ],
    )
    def test_mistakes_end_with_2(self, hires, words, told):
        answer = hires("compare", *words)
        assert answer.code == 2
        assert told in answer.err


def test_two_runs_are_compared_whatever_sets_them_apart(hires):
    a = compared_run(RESULTS, [steps()])
    b = compared_run(RESULTS, [steps(2, 1)], parallel={"name": "sp", "tiles": [2, 1]})
    answer = hires("compare", str(a), b.name)
    assert answer.code == 4
    assert "resnet50 224x224 single->sp fp32" in answer.out
    assert "parallel.tiles" in answer.out


def test_throughput_of_a_run_is_the_same_wherever_it_is_told(hires):
    """It is the median over the attempts; what is of the last attempt only says so."""
    a = compared_run(RESULTS, [[0.8] * 4, [0.16] * 4, [0.2] * 4], campaign="a")  # 5, 25, 20 img/s
    b = compared_run(RESULTS, [[0.1] * 4], campaign="b")
    point = json.loads(hires("compare", "a", "b", "--json").out)["points"][0]
    assert (point["a"], point["b"], point["ratio"]) == pytest.approx((20, 40, 2))
    compared = hires("compare", "a", "b").out
    assert "median over complete attempts of each one's median step" in compared
    assert re.search(r" change +interval ", compared)
    assert "+100.0" in compared
    numbers = json.loads(hires("show", str(a), "--diff", str(b), "--json").out)["numbers"]
    assert [(n["a"], n["b"]) for n in numbers[:2]] == [(20, 40), (0.2, 0.1)]
    told = hires("show", str(a), "--diff", str(b)).out
    assert "medians over the complete attempts" in told
    assert re.search(r"throughput \[img/s\] +20 +40 +[+]100.0$", told, re.MULTILINE)
    assert re.search(r"step time \[s\] +0.2 +0.1 +-50.0$", told, re.MULTILINE)


def test_interval_much_wider_than_the_tolerance_decides_nothing(hires):
    compared_run(RESULTS, [[0.5] * 4, [0.2] * 4], campaign="a")
    compared_run(RESULTS, [[0.8] * 4, [0.4] * 4], campaign="b")
    answer = hires("compare", "a", "b", "--junit", "out.xml")
    assert answer.code == 1
    assert re.search("undecided .*2 and 2 repeats: not enough data; about [0-9]+ ", answer.out)
    assert "no difference" not in answer.out
    assert "nothing is decided" in answer.err
    [suite] = ElementTree.parse("out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "2")
    assert [case[0].tag for case in suite.findall("testcase")] == ["skipped"] * 2
    assert hires("compare", "a", "b", "--metric", "throughput,memory").code == 0


def test_reference_written_of_a_campaign_is_not_that_of_its_failed_point(hires):
    # A run with another learning rate fitted the entry that did not say its own.
    compared_run(RESULTS, [steps()], task={"name": "train"})
    failed_run(RESULTS, optimizer={"lr": 1e30})
    assert hires("compare", "default", "--write-reference", "r.yaml").code == 0
    answer = hires("compare", "default", "--reference", "r.yaml")
    assert answer.code == 0, answer.out
    assert "no reference for" in answer.out


def test_list_says_that_its_numbers_are_of_the_last_attempt(hires):
    compared_run(RESULTS, [[0.8] * 4, [0.16] * 4])
    assert " last attempt " in hires("list", "runs").out


def test_failed_point_is_a_regression_and_its_cause_is_told(hires):
    compared_run(RESULTS, [steps()], campaign="a")
    failed_run(RESULTS, "rank 1 \x1b[31mdied\x00", campaign="b")
    answer = hires("compare", "a", "b")
    assert answer.code == 4
    assert "failed (worse)" in answer.out
    assert "\x1b" not in answer.out


def test_campaign_of_which_nothing_has_ended(hires):
    run = compared_run(RESULTS, [steps()], campaign="a")
    other = compared_run(RESULTS, [steps()], campaign="b")
    (other / "record.json").unlink()
    for file in (other / "a0").iterdir():
        file.unlink()
    (other / "a0").rmdir()
    answer = hires("compare", "a", "b")
    assert answer.code == 1
    assert "no attempt is complete" in answer.out
    assert re.search("nothing is decided: .*no attempt is complete", answer.err)
    assert hires("compare", str(other), "--write-reference", "x.yaml").code == 2
    assert run.exists()


def test_damaged_files_are_named_before_the_error_that_they_cause(hires):
    # The error alone blamed the configs, and no note named a file.
    compared_run(RESULTS, [steps()], campaign="a")
    torn = compared_run(RESULTS, [steps()], campaign="b")
    (torn / "record.json").unlink()
    os.mkfifo(torn / "record.json")
    (torn / "config.yaml").unlink()
    os.mkfifo(torn / "config.yaml")
    answer = hires("compare", "a", "b")
    assert answer.code == 2
    *notes, error = answer.err.splitlines()
    assert all(any(f"{torn.name}/{name}" in note for note in notes)
               for name in ("record.json", "config.yaml"))  # fmt: skip
    assert "no config.yaml of b can be read" in error


def test_metrics_of_the_help_are_those_there_are():
    assert all(metric in verb_compare.PARSER.format_help() for metric in METRICS)
