"""Messages are called and checked rightly, libraries take fair turns, and rates are nccl-tests'."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from hires.bench.message_race import (
    BenchCell,
    RacePlan,
    RaceWorld,
    race_cell,
    relative_noise,
    timed,
)
from hires.bench.messages import (
    BARRIER,
    BENCHED,
    MESSAGES,
    ROOT,
    BenchBuffers,
    arguments,
    messages_in,
    window,
)

RANKS = 3
COLLECTIVES = [name for name in BENCHED if name not in (*MESSAGES, BARRIER)]


def carry_out(name: str, every: list[BenchBuffers]) -> None:
    """Does in one process what a library does, from the arguments that each rank hands it."""
    calls = [arguments(one)[1] for one in every]
    if name in ("all_reduce", "reduce"):
        total = sum(call[0].clone() for call in calls)
        for call in calls if name == "all_reduce" else calls[:1]:
            call[0].copy_(total)
    elif name == "broadcast":
        for call in calls:
            call[0].copy_(calls[ROOT][0])
    elif name in ("all_gather", "gather"):
        for call in calls if name == "all_gather" else calls[:1]:
            parts = call[0] if name == "all_gather" else call[1]
            for part, other in zip(parts, calls, strict=True):
                part.copy_(other[1 if name == "all_gather" else 0])
    elif name == "all_gather_into_tensor":
        for call in calls:
            call[0].copy_(torch.cat([other[1] for other in calls]))
    elif name == "scatter":
        for call, part in zip(calls, calls[ROOT][1], strict=True):
            call[0].copy_(part)
    else:
        given = [split(call[1]) for call in calls]
        for rank, call in enumerate(calls):
            parts = [one[rank] for one in given]
            if "reduce" in name:
                call[0].copy_(sum(part.clone() for part in parts))
            elif isinstance(call[0], list):
                for target, part in zip(call[0], parts, strict=True):
                    target.copy_(part)
            else:
                call[0].copy_(torch.cat(parts))


def split(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [*value.view(RANKS, -1).unbind(0)]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("num_bytes", "dtype"), [(4, torch.float32), (1000, torch.int8)])
def test_right_result_passes_and_any_wrong_number_is_found(name, num_bytes, dtype):
    every = [BenchBuffers(name, num_bytes, dtype, rank, RANKS) for rank in range(RANKS)]
    for one in every:
        one.fill()
    before = [one.num_wrong() for one in every]
    takes = [True, name not in ("reduce", "gather"), name not in ("reduce", "gather")]
    assert [bool(wrong) for wrong in before][:1] == takes[:1] or name == "broadcast"
    carry_out(name, every)
    assert [one.num_wrong() for one in every] == [0, 0, 0]
    for rank, takes_result in enumerate(takes):
        every[rank].output.view(-1)[-1:] += 1
        assert every[rank].num_wrong() == int(takes_result)


def test_messages_of_the_first_and_last_rank_are_checked():
    first, middle, last = (
        BenchBuffers("latency", 64, torch.float32, rank, RANKS) for rank in range(RANKS)
    )
    for one in (first, middle, last):
        one.fill()
    assert (first.peer, middle.peer, last.peer) == (2, -1, 0)
    assert (first.num_wrong(), middle.num_wrong(), last.num_wrong()) == (16, 0, 16)
    first.output.copy_(last.input)
    last.output.copy_(first.input)
    assert first.num_wrong() == last.num_wrong() == 0


def test_sums_in_place_may_be_repeated_without_end():
    buffers = BenchBuffers("all_reduce", 16, torch.float16, 1, 2)
    buffers.fill()
    buffers.zero_inputs()
    for _ in range(100):
        buffers.input.add_(buffers.input)
    assert buffers.input.abs().max() == 0


def test_bandwidths_are_those_of_nccl_tests():
    # 1 MB in 1 ms on four ranks; factors of doc/PERFORMANCE.md.
    rates = {name: one.bandwidths(1_000_000, 4, 1e-3) for name, one in BENCHED.items()}
    assert rates["all_reduce"] == (1e9, 1.5e9)
    assert rates["all_gather_into_tensor"] == (4e9, 3e9)
    assert rates["reduce_scatter_tensor"] == (1e9, 0.75e9)
    assert rates["all_to_all_single"] == (1e9, 0.75e9)
    assert rates["broadcast"] == rates["latency"] == (1e9, 1e9)
    assert rates["bidirectional"] == (2e9, 2e9)


def test_windows_are_those_of_osu_and_fit_into_memory():
    assert [window(size) for size in (4, 1 << 20, 1 << 26, 1 << 30)] == [64, 64, 2, 2]
    assert messages_in("latency", 4) == 2
    assert messages_in("bandwidth", 4) == 64
    assert messages_in("all_reduce", 4) == 1


ALONE = RaceWorld(0, 1, lambda: None, lambda tensor: None)


def doing(call, world=ALONE):
    return lambda buffers, blocking: timed(lambda: call(buffers), world)


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
            buffers.output[0] += 1

    def error(buffers):
        buffers.output[0] += 1

    ways = {"late": doing(late_error), "wrong": doing(error), "right": doing(right)}
    rows = race_cell(BenchCell("all_reduce", 64), ways, ALONE, RacePlan(4, 1e-9))["ways"]
    assert [rows[way]["wrong"] for way in ("late", "wrong", "right")] == [1, 2, 0]


def test_slowest_rank_is_the_sample():
    def largest(tensor):
        if tensor.numel() > 1:  # the other rank took 1 s in the first call of a block
            tensor[0] = 1.0

    world = RaceWorld(0, 1, lambda: None, largest)
    row = race_cell(BenchCell("all_reduce", 64), {"a": doing(right)}, world, RacePlan(1, 1e-9))
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
    world = RaceWorld(0, 1, lambda: None, lambda tensor: tensor.fill_(1.0))
    rows = race_cell(BenchCell("all_reduce", 64), {"a": doing(right)}, world, RacePlan(1, 1e-9))
    assert rows["ways"]["a"] == {"missing": "another rank lacks it"}


def test_fence_comes_before_each_call_and_is_not_timed():
    world = RaceWorld(0, 1, lambda: time.sleep(0.01), lambda tensor: None)
    assert max(timed(lambda: None, world)(3)) < 0.01


def test_time_of_a_message_is_half_a_round_trip():
    def wait(buffers):
        time.sleep(0.002)
        buffers.output.copy_(buffers.input)

    row = race_cell(BenchCell("latency", 64), {"a": doing(wait)}, ALONE, RacePlan(1, 1e-9))
    assert 0.001 <= row["ways"]["a"]["min_s"] < 0.002


def test_noise_is_the_spread_of_rounds():
    assert relative_noise([1.0, 1.0, 1.0, 5.0]) == 0
    assert relative_noise([0.9, 1.0, 1.1]) == pytest.approx(0.148, abs=1e-3)
