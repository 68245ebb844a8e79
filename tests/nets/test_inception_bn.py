"""The network is MXNet's Inception-BN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace

PARAMETERS = 11_295_240
"""With 1000 classes: that of the published ports of BN-Inception, which have the same widths."""
MULTIPLICATIONS = 2_048e6
"""Of one 224x224 image, as the same ports publish; their pools keep an incomplete window."""


def network(**keys: object) -> nn.Module:
    return build_model(ModelConfig(name="inception_bn", **{"classes": 1000, **keys}), seed=0)


def test_parameters_are_the_published_ones():
    assert sum(p.numel() for p in network().parameters()) == PARAMETERS


def test_operations_are_the_published_ones():
    graph = trace(network(), [1, 3, 224, 224], training=False)
    multiplying = [node for node in graph.nodes if node.kind in ("conv2d", "linear")]
    assert sum(node.flops for node in multiplying) / 2 == pytest.approx(MULTIPLICATIONS, rel=0.04)


def test_blocks_are_as_wide_and_as_large_as_published():
    # Ioffe and Szegedy, Figure 5: 28, 14 and 7 pixels behind the pools of a 224x224 image. The
    # pools here drop an incomplete window, as MXNet's do: 27 pixels, then 14 and 7.
    graph = trace(network(), [1, 3, 224, 224], training=False)
    joined = [node.shape[1:] for node in graph.nodes if node.kind == "cat"]
    widths = [256, 320, 576, 576, 576, 608, 608, 1056, 1024, 1024]
    sizes = [27] * 2 + [14] * 5 + [7] * 3
    assert joined == [[width, size, size] for width, size in zip(widths, sizes, strict=True)]


@pytest.mark.parametrize("image", [(32, 32), (75, 61), (224, 160)])
def test_output_does_not_depend_on_the_image_size(image):
    model = network(classes=7, channels=4)
    assert model(torch.empty(2, 4, *image, device="meta")).shape == (2, 7)


def test_first_outputs_are_of_the_size_of_ones():
    model = network(classes=10)
    materialise(model, list(model.state_dict()), seed=0)
    with torch.no_grad():
        output = model.train()(torch.randn(4, 3, 64, 64))
    assert 0.05 < output.std() < 5
