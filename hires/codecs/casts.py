"""Codecs that send numbers in a shorter type."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hires.core.codecs import CODECS, Codec
from hires.core.config.precision_config import PRECISIONS, SIGNIFICANT_BITS

if TYPE_CHECKING:
    from torch import Tensor


class _Cast(Codec):
    name: ClassVar[str]
    """Of the type, as a precision."""
    width: ClassVar[int] = 2

    def num_bytes(self, numbers: int) -> int:
        return self.width * numbers

    def encode(self, numbers: Tensor, codes: Tensor) -> None:
        self._numbers(codes).copy_(numbers)

    def decode(self, codes: Tensor, numbers: Tensor) -> None:
        numbers.copy_(self._numbers(codes))

    def _numbers(self, codes: Tensor) -> Tensor:
        import torch

        return codes.view(getattr(torch, PRECISIONS[self.name]))


@CODECS.register("bf16")
class Bfloat16(_Cast):
    """Numbers as bfloat16: half the bytes of fp32, its range, and 8 bits of each number."""

    name, unit = "bf16", 2.0 ** -SIGNIFICANT_BITS["bf16"]


@CODECS.register("fp16")
class Float16(_Cast):
    """Numbers as float16: half the bytes of fp32, 11 bits of each; from 65520 on infinite."""

    name, unit = "fp16", 2.0 ** -SIGNIFICANT_BITS["fp16"]


@CODECS.register("fp32")
class Float32(_Cast):
    """Numbers as float32: half the bytes of fp64; in bf16 and fp16 nothing is rounded."""

    name, width, unit = "fp32", 4, 2.0 ** -SIGNIFICANT_BITS["fp32"]
