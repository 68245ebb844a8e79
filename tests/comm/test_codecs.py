"""Codecs beside plain references in float64, and sums of codes on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hires.comm.coding import decode, encode
from hires.core.codecs import CODECS, GRADIENT, HALO, KINDS, codec_named, codecs_of
from hires.core.errors import CommError, ConfigError
from tests.helpers.codec_jobs import (
    BOUNDED,
    broadcast_of_other_codecs,
    chained_broadcasts,
    coded_programs,
    sums_with_memory,
)
from tests.helpers.mpi_ranks import run_mpi
from tests.helpers.ranks import run_ranks

SIZES = (1, 255, 256, 257, 70000)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def numbers(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers of very different sizes."""
    facts = {"generator": torch.Generator().manual_seed(size), "dtype": torch.float64}
    return (torch.randn(size, **facts) * 10 ** (3 * torch.randn(size, **facts))).to(dtype)


def coded(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = codec_named(name)
    codes = encode(codec, x)
    assert len(codes) == codec.num_bytes(x.numel())
    return decode(codec, codes, torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BOUNDED)
def test_codec_is_within_its_bound(name: str, size: int, dtype: torch.dtype):
    x = numbers(size, dtype)
    y = coded(name, x)
    if name in TYPES:
        assert torch.equal(y, x.to(TYPES[name]).to(dtype))
        return
    rounding = torch.finfo(dtype).eps
    for block, other in zip(x.double().split(256), y.double().split(256), strict=True):
        most = float(block.abs().max())
        if name == "int8":
            steps = block / (most / 127)  # in float64
            assert ((other / (most / 127) - steps).abs() <= 0.5 + 1e-4 + 127 * rounding).all()
        else:  # 4 bits of a number, and no step below 2^-9 of 448
            allowed = (2.0**-4 * block.abs()).clamp(min=most * 2.0**-10 / 448)
            assert ((other - block).abs() <= allowed * 1.001 + rounding * block.abs()).all()


@pytest.mark.parametrize("name", [*CODECS])
def test_maps_of_any_order_and_empty_tensors_are_coded(name: str):
    x = numbers(2 * 3 * 8 * 9, torch.float32).view(2, 3, 8, 9)
    last = x.contiguous(memory_format=torch.channels_last)
    codec = codec_named(name)
    y = decode(codec, encode(codec, x[:, :, 1:5]), torch.empty_like(last[:, :, 1:5]))
    flat = last[:, :, 1:5].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(y.permute(0, 2, 3, 1).reshape(-1), coded(name, flat))
    assert coded(name, torch.empty(0)).numel() == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*CODECS])
def test_what_is_not_finite_stays_so(name: str, wrong: float):
    # A loss scale must see that a gradient overflowed.
    x = torch.zeros(600)
    x[300] = wrong
    y = coded(name, x)
    assert not y[300].isfinite()
    assert y[:256].isfinite().all()
    assert torch.equal(coded(name, torch.zeros(600)), torch.zeros(600))
    assert (coded(name, torch.full((600,), 2.6e-43)) >= 0).all()


def test_integers_are_refused():
    with pytest.raises(CommError, match=r"codecs are for real numbers, not torch\.int32"):
        encode(codec_named("bf16"), torch.ones(3, dtype=torch.int32))


def test_setting_names_a_codec_for_every_kind_or_for_each():
    assert codecs_of("none") == {}
    assert codecs_of("bf16") == dict.fromkeys(KINDS, "bf16")
    assert codecs_of("topk") == {GRADIENT: "topk"}
    assert codecs_of({"gradient": "int8", "halo": "none"}) == {GRADIENT: "int8"}
    for setting, words in (
        ("bf61", "unknown codec 'bf61'; did you mean bf16"),
        ({"haloo": "bf16"}, "unknown kind of message 'haloo'; did you mean halo"),
        ({HALO: "fp4"}, "unknown codec 'fp4'"),
        ({HALO: "topk"}, "topk serves gradient; for halo choose one of none, int8"),
        (3, "comm.codec=3 must be a codec, as bf16, or one for each kind"),
    ):
        with pytest.raises(ConfigError, match=words):
            codecs_of(setting)


@pytest.mark.parametrize("size", SIZES)
def test_topk_sends_the_largest_numbers_of_each_block(size: int):
    x = numbers(size, torch.float32)
    for block, other in zip(x.split(256), coded("topk", x).split(256), strict=True):
        expected = torch.zeros_like(block)
        for place in sorted(range(len(block)), key=lambda i: -abs(float(block[i])))[:4]:
            expected[place] = block[place]
        assert torch.equal(other, expected)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["sum", "scatter"])
def test_what_topk_leaves_out_is_part_of_later_sums(kind: str):
    # What was summed in all steps, and what is left on the ranks, is all that they gave.
    answers = run_ranks(sums_with_memory, 3, kind, 12)
    for given, summed, left, _ in answers:
        total = sum(own[0] for own in answers)
        missing = sum(own[2] for own in answers)
        assert ((summed + missing - total)[summed != 0].abs() < 1e-4 * total.abs().max()).all()
        assert left.norm() > 0.01 * given.norm()
    if kind == "sum":
        assert all(torch.equal(answers[0][1], own[1]) for own in answers)
    assert all(own[3] < 1 / 20 for own in answers)  # of the bytes of fp32


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_sums_of_codes_are_within_the_bound(num_ranks: int):
    answers = run_ranks(coded_programs, num_ranks, ("gloo", "shm"), range(60))
    assert answers == [[]] * num_ranks


@pytest.mark.slow
@pytest.mark.dist
def test_five_hundred_random_sums_of_codes_are_within_the_bound():
    answers = run_ranks(coded_programs, 3, ("gloo", "shm"), range(500), timeout_s=300)
    assert answers == [[]] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("job", [coded_programs, chained_broadcasts])
def test_random_sums_and_broadcasts_of_codes_over_mpi(job, mpi: str, tmp_path: Path):
    answers = run_mpi(mpi, job, 3, ("mpi", "gloo"), range(40), folder=tmp_path)
    assert answers == [[]] * 3


@pytest.mark.dist
def test_codec_that_the_other_rank_does_not_use_is_named_on_both():
    for error in run_ranks(broadcast_of_other_codecs, 2, ("bf16", "fp16")):
        assert "(root 0, bf16)" in error
        assert "(root 0, fp16)" in error


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_chain_brings_the_codes_of_its_root_to_all_ranks_bit_by_bit(num_ranks: int):
    answers = run_ranks(chained_broadcasts, num_ranks, ("gloo", "shm"), range(80))
    assert answers == [[]] * num_ranks
