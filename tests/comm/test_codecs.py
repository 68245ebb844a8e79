"""Codecs beside plain references in float64, and sums of codes on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hires.comm.coding import decode, encode
from hires.core.codecs import CODECS, GRADIENT, HALO, KINDS, codec_named, codecs_of
from hires.core.errors import CommError, ConfigError
from tests.helpers.codec_jobs import coded_programs
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
@pytest.mark.parametrize("name", [*CODECS])
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
    assert codecs_of({"gradient": "int8", "halo": "none"}) == {GRADIENT: "int8"}
    for setting, words in (
        ("bf61", "unknown codec 'bf61'; did you mean bf16"),
        ({"haloo": "bf16"}, "unknown kind of message 'haloo'; did you mean halo"),
        ({HALO: "fp4"}, "unknown codec 'fp4'"),
        (3, "comm.codec=3 must be a codec, as bf16, or one for each kind"),
    ):
        with pytest.raises(ConfigError, match=words):
            codecs_of(setting)


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_sums_of_codes_are_within_the_bound(num_ranks: int):
    answers = run_ranks(coded_programs, num_ranks, ("gloo", "shm"), range(60))
    assert answers == [[]] * num_ranks


@pytest.mark.mpi
def test_random_sums_of_codes_over_mpi(mpi: str, tmp_path: Path):
    answers = run_mpi(mpi, coded_programs, 3, ("mpi", "gloo"), range(40), folder=tmp_path)
    assert answers == [[]] * 3
