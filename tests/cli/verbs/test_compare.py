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
    assert answer.out.count("slower (worse)") == 3
    assert re.search("overall +slower *\\(worse\\)? .* -[89]", answer.out)
    assert hires("compare", "before", "same").code == 0
    answer = hires("compare", "slow", "before", "--metric", "throughput,memory,loss")
    assert (answer.code, answer.out.count("faster")) == (0, 3)
    answer = hires("compare", "--tolerance=-20%,+5%", "before", "slow")
    assert (answer.code, "-20%,+5%" in answer.out) == (0, True)
    words = ("compare", "before", "slow", "--metric", "throughput,step_time", "--json")
    facts = json.loads(hires(*words).out)
    assert (facts["regression"], facts["seed"]) == (True, 0)
    assert [point["status"] for point in facts["points"]] == ["worse"] * 4
    assert facts["points"][0]["unit"] == "img/s"
    assert facts["points"][0]["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
    assert json.loads(hires(*words).out)["points"] == facts["points"]


@pytest.mark.usefixtures("campaigns")
def test_references_are_written_and_held(hires):
    words = ("--tolerance=-5%,+15%", "--metric", "throughput,memory", "--cluster", "node*")
    answer = hires("compare", "before", "--write-reference", "ref.yaml", *words)
    assert answer.out == "ref.yaml: 4 written, 4 in all\n"
    entries = yaml.safe_load(Path("ref.yaml").read_text())["references"]
    assert (entries[0]["tolerance"], entries[0]["cluster"]) == (["-5%", "+15%"], "node*")
    assert hires("compare", "same", "ref.yaml").code == 0
    answer = hires("compare", "slow", "--reference", "ref.yaml")
    assert (answer.code, "-5%,+15%" in answer.out) == (4, True)
    # A run with another learning rate fitted the entry that did not say its own.
    failed_run(RESULTS, optimizer={"lr": 1e30}, task={"name": "train"}, campaign="same")
    answer = hires("compare", "same", "--reference", "ref.yaml")
    assert (answer.code, "no reference for" in answer.out) == (0, True)


def test_mistakes_end_with_2(hires):
    for campaign in "ab":
        compared_run(RESULTS, [[0.5] * 4], campaign=campaign)
    for words, text in (
        (["a"], "needs two runs, campaigns or references: A and B"),
        (["a", "b", "--reference", "ref.yaml"], "needs one run or campaign"),
        (["a", "b", "--metric", "troughput"], "did you mean throughput?"),
        (["a", "b", "--tolerance", "much"], "write 5%"),
        (["a", "b", "--cluster", "x"], "--write-reference"),
    ):
        answer = hires("compare", *words)
        assert (answer.code, text in answer.err) == (2, True)


def test_interval_much_wider_than_the_tolerance_decides_nothing_and_a_failed_point_is_worse(hires):
    compared_run(RESULTS, [[0.5] * 4, [0.2] * 4], campaign="a")
    compared_run(RESULTS, [[0.8] * 4, [0.4] * 4], campaign="b")
    answer = hires("compare", "a", "b")
    assert answer.code == 1
    assert re.search("undecided .*2 and 2 repeats: not enough data; three repeats", answer.out)
    assert "nothing is decided" in answer.err
    answer = hires("compare", "a", "b", "--json")  # a second object was printed behind the first
    assert (answer.code, json.loads(answer.out)["points"][0]["status"]) == (1, "undecided")
    assert hires("compare", "a", "b", "--metric", "throughput,memory").code == 0
    failed_run(RESULTS, "rank 1 \x1b[31mdied\x00", campaign="c")
    answer = hires("compare", "a", "c")
    assert (answer.code, "failed (worse)" in answer.out, "\x1b" in answer.out) == (4, True, False)
