"""Decodes the latents of a diffusers VAE on tiles of the image.

The VAE's own ``enable_tiling`` blends overlapping parts, each with norms and attention of its own;
here both are of the whole image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from hires.engine.sharding import shard


def shard_decoder(
    vae: AutoencoderKL, mesh: Any, *, example: Tensor, tiles: Sequence[int] | None = None
) -> None:
    """Puts the decoder of a VAE on tiles; ``vae.decode(latents)`` and pipelines stay as they are.

    Each rank then gets the whole image. Gradients stop at the latents: call it without.

    Args:
        vae: an ``AutoencoderKL``.
        mesh: the ranks that share an image, as for :func:`hires.shard`.
        example: latents of the usual size, (n, C, h, w); only their shape and type count.
        tiles: [rows, cols] of the grid, if it does not follow from the mesh.

    Raises:
        ConfigError: the decoder cannot run on these tiles.
    """
    with torch.no_grad():
        vae.decoder = shard(vae.decoder, mesh, example=example, tiles=tiles)
    # Latents are whole, also those that have the size of a window of the example.
    vae.decoder.register_forward_pre_hook(_whole, with_kwargs=True)


def _whole(decoder: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    return args[:1], {"size": args[0].shape[2:]}
