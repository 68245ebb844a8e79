"""Is every measured operation called and checked rightly, and its bandwidth that of nccl-tests?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hires.bench.message_operations import (
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("num_bytes", [4, 1000])
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
        every[rank].taken.view(-1)[-1:] += 1
        assert every[rank].num_wrong() == int(takes_result)


def test_messages_of_the_first_and_last_rank_are_checked():
    first, middle, last = (
        BenchBuffers("latency", 64, torch.float32, rank, RANKS) for rank in range(RANKS)
    )
    for one in (first, middle, last):
        one.fill()
    assert (first.peer, middle.peer, last.peer) == (2, -1, 0)
    assert (first.num_wrong(), middle.num_wrong(), last.num_wrong()) == (16, 0, 16)
    first.taken.copy_(last.given)
    last.taken.copy_(first.given)
    assert first.num_wrong() == last.num_wrong() == 0


def test_sums_in_place_may_be_repeated_without_end():
    buffers = BenchBuffers("all_reduce", 16, torch.float16, 1, 2)
    buffers.fill()
    buffers.rest()
    for _ in range(100):
        buffers.given.add_(buffers.given)
    assert buffers.given.abs().max() == 0


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
