"""Repeats the step of one process so that only rounding differs, which measures its noise.

One draw shows too little: rounding errors add up or cancel by chance, and in a network that
amplifies them (14 layers of sin(5 y + 1)) the luck of one draw is a factor of ten. So several runs
move the pixels, each in random directions and by more ulps than the one before, as the operators of
a layout are off by several ulps of their own; others change the order of the samples, and with it
that of all sums over them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rerun(NamedTuple):
    """What a repeated step changes."""

    ulps: int = 0
    """Each pixel is moved by so many, up or down at random."""
    in_float32: bool = False
    """Whether the ulps are those of float32."""
    shift: int | None = None
    """The samples are reversed and then rotated by so many."""

    def moved(self, images: Tensor) -> Tensor:
        """Returns images (n, C, H, W) whose pixels are moved, in their own type."""
        if not self.ulps:
            return images
        pixels = images.float() if self.in_float32 else images
        generator = torch.Generator().manual_seed(self.ulps)
        up = torch.rand(pixels.shape, generator=generator).to(images.device) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(pixels.dtype)
        for _ in range(self.ulps):
            pixels = torch.nextafter(pixels, towards)
        return pixels.to(images)

    def order(self, num_samples: int) -> Tensor:
        """Returns the place in the batch of each sample, (n,)."""
        places = torch.arange(num_samples)
        return places if self.shift is None else places.flip(0).roll(self.shift)


AS_IS = Rerun()


def reruns(draws: bool, lowers: bool) -> list[Rerun]:
    """Returns the repeated steps that measure the noise of a network.

    A network that ``draws`` masks draws them for the place of a sample: its samples stay where they
    are. In one that ``lowers`` a part to float32, an ulp of float64 is lost: it is moved by those
    of float32.
    """
    moves = [Rerun(ulps, lowers) for ulps in (1, 2, 3, 4)]
    return moves if draws else [moves[0], Rerun(shift=0), *moves[1:], Rerun(shift=1)]
