"""The networks are the published ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace

SMALL = {"resnet": {"depth": 18}, "preact_resnet": {"n": 1}}
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main_path(model: nn.Module) -> int:
    """Layers with weights on the longest path: all but the projections of shortcuts."""
    return sum(
        isinstance(module, (nn.Conv2d, nn.Linear))
        for name, module in model.named_modules()
        if "downsample" not in name and "projection" not in name
    )


def preact(n: int, classes: int = 10) -> nn.Module:
    return build_model(ModelConfig(name="preact_resnet", n=n, classes=classes), seed=0)


@pytest.mark.parametrize("depth", PUBLISHED)
def test_resnet_has_the_published_depth_and_parameters(depth):
    model = build_model(ModelConfig(depth=depth, classes=1000), seed=0)
    assert num_parameters(model) == PUBLISHED[depth]
    assert main_path(model) == depth


@pytest.mark.parametrize("n", [1, 2, 12])
def test_preact_resnet_has_depth_9n_plus_2(n):
    assert main_path(preact(n)) == 9 * n + 2


@pytest.mark.parametrize(("n", "millions"), [(18, 1.7), (111, 10.2)])
def test_preact_resnet_has_the_published_parameters(n, millions):
    # ResNet-164 and ResNet-1001 of He et al. 2016, Table 4, which counts a percent less.
    assert num_parameters(preact(n)) / 1e6 == pytest.approx(millions, rel=0.015)


@pytest.mark.parametrize("size", [(32, 32), (75, 61), (33, 128)])
@pytest.mark.parametrize("name", ["resnet", "preact_resnet"])
def test_output_does_not_depend_on_the_image_size(name, size):
    model = build_model(ModelConfig(name=name, **SMALL[name], classes=7, channels=4), seed=0)
    assert model(torch.empty(2, 4, *size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet", "preact_resnet"])
def test_network_returns_logits(name):
    # A softmax before the cross-entropy trains to a loss that never gets small.
    model = build_model(ModelConfig(name=name, **SMALL[name], classes=7), seed=0)
    graph = trace(model, [2, 3, 32, 32], training=True)
    assert graph.nodes[-1].kind == "linear"
    assert not {"softmax", "log_softmax"} & {node.kind for node in graph.nodes}


@pytest.mark.parametrize("name", ["resnet", "preact_resnet"])
def test_first_outputs_are_of_the_size_of_ones(name):
    # He's first values keep the signal's size through the layers, so that training can begin.
    model = build_model(ModelConfig(name=name, **SMALL[name], classes=10), seed=0)
    materialise(model, list(model.state_dict()), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        output = model.train()(torch.randn(4, 3, 48, 48, generator=generator))
    assert 0.05 < output.std() < 5


def test_stride_halves_the_map_in_every_group_but_the_first():
    graph = trace(preact(1), [1, 3, 20, 18], training=True)
    sums = [node for node in graph.nodes if node.kind == "add"]
    assert [(node.layer, node.shape) for node in sums] == [
        ("group1.0", [1, 64, 20, 18]),
        ("group2.0", [1, 128, 10, 9]),
        ("group3.0", [1, 256, 5, 5]),
    ]


def test_depth_that_nobody_published_is_refused():
    with pytest.raises(ConfigError, match=r"model\.depth=42 .* choose one of 18, 34, 50, 101, 152"):
        build_model(ModelConfig(depth=42, classes=2), seed=0)


def test_unknown_network_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"unknown network 'resnext'; did you mean resnet\?"):
        build_model(ModelConfig(name="resnext", classes=2), seed=0)


def test_number_of_classes_must_be_known():
    with pytest.raises(ConfigError, match=r"model\.classes is unset"):
        build_model(ModelConfig(), seed=0)
