"""``hires compare`` tells better from worse with the right exit code, and decides nothing on too
little data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

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
def test_exit_code_is_4_if_the_second_is_worse(hires):
    answer = hires("compare", "before", "slow")
    assert answer.code == 4, answer.err
    assert answer.out.count("slower (worse)") == 2
    assert "overall throughput: slower: -9" in answer.out
    assert "2000 resamples, seed 0" in answer.out
    assert hires("compare", "before", "same").code == 0
    answer = hires("compare", "slow", "before")
    assert (answer.code, answer.out.count("faster")) == (0, 3)
    assert hires("compare", "before", "slow", "--metric", "memory,loss").code == 0
    for words in (["--tolerance", "-20%,+5%"], ["--tolerance=-20%,+5%"]):
        answer = hires("compare", *words, "before", "slow")
        assert (answer.code, "-20%,+5%" in answer.out) == (0, True)


@pytest.mark.usefixtures("campaigns")
def test_json_holds_the_verdicts(hires):
    words = ("compare", "before", "slow", "--metric", "throughput,step_time")
    answer = hires(*words, "--json")
    told = json.loads(answer.out)
    assert (answer.code, told["regression"], told["seed"]) == (4, True, 0)
    assert [point["status"] for point in told["points"]] == ["worse"] * 4
    assert [overall["metric"] for overall in told["overall"]] == ["throughput", "step_time"]
    assert told["points"][0]["unit"] == "img/s"
    assert told["points"][0]["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
    assert json.loads(hires(*words, "--json").out)["points"] == told["points"]


@pytest.mark.usefixtures("campaigns")
def test_references_are_written_and_held(hires):
    made = hires(
        "compare", "before", "--write-reference", "ref.yaml", "--tolerance=-5%,+15%",
        "--metric", "throughput,memory", "--cluster", "node*",
    )  # fmt: skip
    assert made.out == "ref.yaml: 4 written, 4 in all\n"
    entries = yaml.safe_load(Path("ref.yaml").read_text())["references"]
    assert (entries[0]["tolerance"], entries[0]["cluster"]) == (["-5%", "+15%"], "node*")
    for words in (["--reference", "ref.yaml", "same"], ["same", "ref.yaml"]):
        assert hires("compare", *words).code == 0
    answer = hires("compare", "slow", "--reference", "ref.yaml")
    assert (answer.code, "-5%,+15%" in answer.out) == (4, True)
    # A run with another learning rate fitted the entry that did not say its own.
    failed_run(RESULTS, optimizer={"lr": 1e30}, task={"name": "train"}, campaign="same")
    answer = hires("compare", "same", "--reference", "ref.yaml")
    assert (answer.code, "no reference for" in answer.out) == (0, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"], "needs two runs, campaigns or references: A and B"),
        (["a", "b", "--reference", "ref.yaml"], "needs one run or campaign"),
        (["a", "nothing"], "'nothing' is no campaign and no run"),
        (["a", "b", "--metric", "troughput"], "did you mean throughput?"),
        (["a", "b", "--tolerance", "much"], "write 5%"),
        (["a", "b", "--resamples", "3"], "100 or more"),
        (["a", "b", "--cluster", "x"], "--write-reference"),
        (["a", "b", "--write-reference", "x.yaml"], "takes one run or campaign"),
    ],
)
def test_mistakes_end_with_2(hires, words, told):
    for campaign in "ab":
        compared_run(RESULTS, [[0.5] * 4], campaign=campaign)
    answer = hires("compare", *words)
    assert (answer.code, told in answer.err) == (2, True)


def test_interval_much_wider_than_the_tolerance_decides_nothing(hires):
    compared_run(RESULTS, [[0.5] * 4, [0.2] * 4], campaign="a")
    compared_run(RESULTS, [[0.8] * 4, [0.4] * 4], campaign="b")
    answer = hires("compare", "a", "b")
    assert answer.code == 1
    assert re.search("undecided .*2 and 2 repeats: not enough data; about [0-9]+ ", answer.out)
    assert "no difference" not in answer.out
    assert "nothing is decided" in answer.err
    assert hires("compare", "a", "b", "--metric", "throughput,memory").code == 0


def test_failed_point_is_a_regression_and_its_cause_is_told(hires):
    compared_run(RESULTS, [steps()], campaign="a")
    failed_run(RESULTS, "rank 1 \x1b[31mdied\x00", campaign="b")
    answer = hires("compare", "a", "b")
    assert answer.code == 4
    assert "failed (worse)" in answer.out
    assert "\x1b" not in answer.out
