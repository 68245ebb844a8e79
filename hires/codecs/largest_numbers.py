"""Sends the largest numbers alone; what is left out stays on the rank, and adds to the next sum.

    block of 256   ... 0.1 -7.0 0.3 2.0 ...        codes   | values of 4 | their places of 1 byte |

Source:
    Stich et al., "Sparsified SGD with memory", NeurIPS 2018; here the largest of each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.codecs import CODECS, GRADIENT, Codec

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, KEPT = 256, 4


@CODECS.register("topk")
class Largest(Codec):
    """The 4 largest of every 256 numbers of a gradient, the others later: a 51st of fp32."""

    kinds, block, unit, leaves = (GRADIENT,), BLOCK, None, True

    def num_bytes(self, numbers: int) -> int:
        """Returns 20 for each block."""
        return 5 * KEPT * -(-numbers // BLOCK)

    def encode(self, numbers: Tensor, codes: Tensor) -> None:
        """Writes values and places; NaN counts as the largest."""
        import torch

        blocks = numbers
        if len(numbers) % BLOCK:
            blocks = numbers.new_zeros(self.padded(len(numbers)))
            blocks[: len(numbers)].copy_(numbers)
        blocks = blocks.view(-1, BLOCK)
        _, places = blocks.abs().topk(KEPT, 1, sorted=False)
        size = 4 * places.numel()
        codes[:size].view(torch.float32).copy_(blocks.gather(1, places).view(-1))
        codes[size:].copy_(places.view(-1))

    def decode(self, codes: Tensor, numbers: Tensor) -> None:
        """Fills numbers with zeros but for those that were sent."""
        import torch

        size = len(codes) // 5 * 4
        values = codes[:size].view(torch.float32).view(-1, KEPT).to(numbers.dtype)
        blocks = numbers.new_zeros(self.padded(len(numbers))).view(-1, BLOCK)
        blocks.scatter_(1, codes[size:].view(-1, KEPT).long(), values)
        numbers.copy_(blocks.view(-1)[: len(numbers)])
