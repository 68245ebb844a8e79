"""EDSR is the published one and begins small enough to learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.edsr import EDSR, ResidualBlock

PUBLISHED = {
    (16, 64, 2): 1_369_859,
    (16, 64, 3): 1_554_499,
    (16, 64, 4): 1_517_571,
    (32, 256, 2): 40_729_603,
    (32, 256, 3): 43_680_003,
    (32, 256, 4): 43_089_923,
}
"""(blocks, width, scale) -> parameters of the authors' networks, but for the shifts of the mean."""


def edsr(**keys) -> nn.Module:
    return build_model(ModelConfig(name="edsr", **keys), seed=0)


@pytest.mark.parametrize(("blocks", "width", "scale"), PUBLISHED)
def test_parameters_are_as_many_as_published(blocks, width, scale):
    count = sum(p.numel() for p in edsr(blocks=blocks, width=width, scale=scale).parameters())
    assert count == PUBLISHED[blocks, width, scale]


@pytest.mark.parametrize("size", [(8, 8), (7, 13), (1, 2)])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_image_becomes_scale_times_larger(scale, size):
    model = edsr(blocks=1, width=4, scale=scale, channels=2)
    output = model(torch.empty(2, 2, *size, device="meta"))
    assert output.shape == (2, 2, scale * size[0], scale * size[1])


def test_block_adds_its_convolutions_times_their_scale():
    block = ResidualBlock(3, 0.1, blocks=1)
    x = torch.randn(1, 3, 6, 5)
    expected = x + 0.1 * block.conv2(block.conv1(x).clamp(0))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("blocks", [2, 16, 32])
def test_first_output_is_of_the_size_of_the_image(blocks):
    # Without norms the usual first values grow threefold a block: 16 blocks began at a thousand.
    model = edsr(blocks=blocks, width=16)
    materialise(model, list(model.state_dict()), seed=0)
    with torch.no_grad():
        output = model(torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(1)))
    assert 0.05 < output.std() < 5


def test_network_has_no_norm_and_needs_no_classes():
    assert not any("Norm" in type(module).__name__ for module in edsr().modules())


@pytest.mark.parametrize("scale", [1, 5])
def test_scale_that_the_upsampler_does_not_have_is_refused(scale):
    with pytest.raises(ConfigError, match=rf"model\.scale={scale} .*choose one of 2, 3, 4"):
        EDSR(1, 4, scale, 1.0)
