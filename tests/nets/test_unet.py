"""U-Net gives every pixel its classes, on images of any size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.unet import InterpolatedUp, TransposedUp

UPSAMPLES = ["transposed", "bilinear", "nearest"]


def unet(upsample: str, levels: int = 3, width: int = 4, classes: int = 5) -> nn.Module:
    config = ModelConfig(name="unet", levels=levels, width=width, upsample=upsample)
    config.classes = classes
    return build_model(config, seed=0)


@pytest.mark.parametrize("size", [(64, 64), (75, 61), (33, 8), (1, 3)])
@pytest.mark.parametrize("upsample", UPSAMPLES)
def test_every_pixel_has_its_classes(upsample, size):
    model = unet(upsample)
    assert model(torch.empty(2, 3, *size, device="meta")).shape == (2, 5, *size)


def test_parameters_of_the_usual_size():
    # 4 levels from 64 channels: 31.04 million with transposed convolutions is what all count.
    count = sum(p.numel() for p in unet("transposed", 4, 64, 2).parameters())
    assert count == 31_037_698


@pytest.mark.parametrize("upsample", UPSAMPLES)
def test_output_depends_on_the_pixel_itself_and_on_far_ones(upsample):
    model = unet(upsample)
    materialise(model, list(model.state_dict()), seed=0)
    x = torch.randn(1, 3, 33, 31, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model.train()(x)[0, :, 16, 15].sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 16, 15].abs().sum() > 0
    assert x.grad[0, :, 2, 3].abs().sum() > 0


def test_transposed_way_up_cuts_what_lies_beyond_the_skip():
    up = TransposedUp(2)
    x = torch.randn(1, 4, 3, 4)
    assert torch.equal(up(x, (5, 8)), up.conv(x)[:, :, :5, :8])
    assert torch.equal(up(x, (6, 7)), up.conv(x)[:, :, :6, :7])
    assert torch.equal(up(x, (6, 8)), up.conv(x))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_interpolating_way_up_comes_to_the_skip_itself(mode):
    up = InterpolatedUp(2, mode)
    x = torch.randn(1, 4, 3, 4)
    assert torch.equal(up(x, (5, 8)), up.conv(F.interpolate(x, (5, 8), mode=mode)))


def test_interpolating_network_has_no_transposed_convolution():
    kinds = {type(module) for module in unet("bilinear").modules()}
    assert nn.ConvTranspose2d not in kinds


def test_first_loss_is_that_of_a_guess():
    model = unet("transposed")
    materialise(model, list(model.state_dict()), seed=0)
    with torch.no_grad():
        output = model.train()(torch.randn(2, 3, 32, 32, generator=torch.Generator()))
    loss = F.cross_entropy(output, torch.zeros(2, 32, 32, dtype=torch.int64))
    assert float(loss) == pytest.approx(math.log(5), rel=0.1)


def test_unknown_way_up_is_refused():
    with pytest.raises(ConfigError, match=r"model\.upsample='cubic' .* transposed, bilinear, near"):
        ModelConfig(name="unet", upsample="cubic")
