"""Do libraries take fair turns, is the slowest rank the sample, and is a wrong result found?"""

from __future__ import annotations

import time

import pytest
import torch

from hires.bench.message_race import (
    BenchCell,
    RacePlan,
    RaceWorld,
    race_cell,
    relative_noise,
    timed,
)

ALONE = RaceWorld(0, 1, lambda: None, lambda tensor: None)


def doing(call, agreed=ALONE):
    return lambda buffers, blocking: timed(lambda: call(buffers), agreed)


def right(buffers):
    return None  # a sum of one rank is there already


def test_rows_have_medians_and_counts_of_all_rounds():
    row = race_cell(BenchCell("all_reduce", 64), {"a": doing(right)}, ALONE, RacePlan(3, 1e-4))
    one = row["ways"]["a"]
    assert row["bytes"] == 64
    assert one["wrong"] == 0
    assert len(one["rounds_s"]) == 3
    assert one["count"] % 3 == 0
    assert one["min_s"] <= one["p50_s"] <= one["p99_s"]


def test_wrong_number_is_found_in_the_first_round_and_in_the_last():
    calls = []

    def late_error(buffers):
        calls.append(0)
        if len(calls) > 13:
            buffers.taken[0] += 1

    def error(buffers):
        buffers.taken[0] += 1

    ways = {"late": doing(late_error), "wrong": doing(error), "right": doing(right)}
    rows = race_cell(BenchCell("all_reduce", 64), ways, ALONE, RacePlan(4, 1e-9))["ways"]
    assert [rows[way]["wrong"] for way in ("late", "wrong", "right")] == [1, 2, 0]


def test_slowest_rank_is_the_sample():
    def largest(tensor):
        if tensor.numel() > 1:  # the other rank took 1 s in the first call of a block
            tensor[0] = 1.0

    agreed = RaceWorld(0, 1, lambda: None, largest)
    row = race_cell(BenchCell("all_reduce", 64), {"a": doing(right)}, agreed, RacePlan(1, 1e-9))
    assert row["ways"]["a"]["count"] == 2
    assert row["ways"]["a"]["p50_s"] == pytest.approx(0.5, abs=0.1)


def test_contestant_without_the_operation_is_left_out_with_its_reason():
    def refuse(buffers, blocking):
        raise ValueError("no sums of this type\nmore")

    ways = {"a": doing(right), "lacks": lambda *_: None, "refuses": refuse}
    rows = race_cell(BenchCell("all_reduce", 64), ways, ALONE, RacePlan(1, 1e-9))["ways"]
    assert rows["lacks"] == {"missing": "it has no such operation or type"}
    assert rows["refuses"] == {"missing": "no sums of this type"}
    assert "p50_s" in rows["a"]


def test_contestant_that_only_another_rank_lacks_is_left_out_everywhere():
    agreed = RaceWorld(0, 1, lambda: None, lambda tensor: tensor.fill_(1.0))
    rows = race_cell(BenchCell("all_reduce", 64), {"a": doing(right)}, agreed, RacePlan(1, 1e-9))
    assert rows["ways"]["a"] == {"missing": "another rank lacks it"}


def test_fence_comes_before_each_call_and_is_not_timed():
    agreed = RaceWorld(0, 1, lambda: time.sleep(0.01), lambda tensor: None)
    assert max(timed(lambda: None, agreed)(3)) < 0.01


def test_time_of_a_message_is_half_a_round_trip():
    def wait(buffers):
        time.sleep(0.002)
        buffers.taken.copy_(buffers.given)

    row = race_cell(BenchCell("latency", 64), {"a": doing(wait)}, ALONE, RacePlan(1, 1e-9))
    assert 0.001 <= row["ways"]["a"]["min_s"] < 0.002


def test_noise_is_the_spread_of_rounds():
    assert relative_noise([1.0, 1.0, 1.0, 5.0]) == 0
    assert relative_noise([0.9, 1.0, 1.1]) == pytest.approx(0.148, abs=1e-3)


def test_types_are_named_as_torch_has_them():
    row = race_cell(
        BenchCell("reduce", 8, "bfloat16"), {"a": doing(right)}, ALONE, RacePlan(1, 1e-9)
    )
    assert row["dtype"] == "bfloat16"
    assert torch.bfloat16.itemsize * 4 == row["bytes"]
