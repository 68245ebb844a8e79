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

from hires.core.errors import ConfigError
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
    names = ("sample", "latent_embeds")  # as diffusers' decoders have them
    given = {**dict(zip(names, args, strict=False)), **more}
    latents = given.pop("sample", None)
    others = [name for name, value in given.items() if value is not None]
    if latents is None or others or len(args) > len(names):
        extra = f", not {', '.join(others)}" if others else ""
        raise ConfigError(
            f"a decoder on tiles takes latents alone{extra}; leave the rest out, or use the "
            f"decoder of the plain VAE"
        )
    return (latents,), {"size": latents.shape[2:]}
