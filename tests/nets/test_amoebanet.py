"""AmoebaNet-D is the published one, on images of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.amoebanet import AmoebaNetD, Cell, FactorizedReduction
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace

PUBLISHED = {
    (18, 208, 1000): 81_505_540,
    (18, 416, 1000): 319_024_120,
    (18, 208, 10): 78_209_830,
    (18, 416, 10): 312_433_690,
}


def amoebanet(layers: int = 3, filters: int = 8, classes: int = 4) -> nn.Module:
    config = ModelConfig(name="amoebanet", layers=layers, filters=filters, classes=classes)
    return build_model(config, seed=0)


@pytest.mark.parametrize(("layers", "filters", "classes"), PUBLISHED)
def test_parameters_are_as_many_as_published(layers, filters, classes):
    model = amoebanet(layers, filters, classes)
    assert all(parameter.is_meta for parameter in model.parameters())  # nothing is allocated
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[layers, filters, classes]


@pytest.mark.parametrize(
    ("layers", "filters", "millions"), [(18, 544, 542.7), (36, 544, 1056), (72, 512, 1845)]
)
def test_large_ones_have_the_sizes_of_the_papers(layers, filters, millions):
    model = amoebanet(layers, filters, 1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("size", [(64, 64), (33, 58), (75, 61), (17, 1), (128, 33)])
def test_image_may_have_any_size(size):
    model = amoebanet()
    assert model(torch.empty(2, 3, *size, device="meta")).shape == (2, 4)


def test_a_network_of_an_odd_image_trains():
    model = amoebanet()
    materialise(model, list(model.state_dict()), seed=0)
    generator = torch.Generator().manual_seed(1)
    output = model.train()(torch.randn(4, 3, 51, 38, generator=generator))
    assert 0.05 < output.std() < 5
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_halving_rounds_up():
    graph = trace(amoebanet(), [2, 3, 75, 61], training=True)
    maps = [tuple(n.shape[2:]) for n in graph.nodes if n.kind == "cat" and n.layer.count(".") == 1]
    halved = [(19, 16), (10, 8), (5, 4), (3, 2)]
    assert [size for k, size in enumerate(maps) if size not in maps[:k]] == halved


def plain_reduction(module: FactorizedReduction, x: Tensor) -> Tensor:
    """Pixel by pixel: (2i, 2j) for the first half of the channels, (2i+1, 2j+1) for the second."""
    n, _, height, width = x.shape
    rows, cols = -(-height // 2), -(-width // 2)
    first, second = (conv.weight[:, :, 0, 0] for conv in (module.conv1, module.conv2))
    made = torch.zeros(n, len(first) + len(second), rows, cols, dtype=x.dtype)
    for i in range(rows):
        for j in range(cols):
            made[:, : len(first), i, j] = x[:, :, 2 * i, 2 * j].clamp(0) @ first.T
            if 2 * i + 1 < height and 2 * j + 1 < width:  # zero beyond the image
                made[:, len(first) :, i, j] = x[:, :, 2 * i + 1, 2 * j + 1].clamp(0) @ second.T
    return made


@pytest.mark.parametrize("size", [(6, 8), (7, 5), (6, 5), (1, 2)])
def test_second_half_of_a_factorized_reduction_sees_the_odd_pixels(size):
    torch.manual_seed(0)
    module = FactorizedReduction(3, 4).double().eval()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = plain_reduction(module, x) / (1 + module.bn.eps) ** 0.5
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_reduction_cell_takes_true_maxima():
    # Zero-padded pools, or pools replaced by convolutions, never return the negative maximum.
    cell = Cell(4, 4, 4, reduces=True, skip_is_larger=False)
    pools = [part for part in cell.operations if isinstance(part, nn.MaxPool2d)]
    assert len(pools) == 4
    for pool in pools:
        assert pool(torch.full((1, 4, 5, 7), -3.0)).unique().tolist() == [-3.0]


def test_cell_hands_on_the_state_as_the_next_skip():
    cell = Cell(4, 6, 4, reduces=False, skip_is_larger=False)
    skip, state = torch.randn(2, 4, 5, 5), torch.randn(2, 6, 5, 5)
    next_skip, next_state = cell(skip, state)
    assert next_skip is state
    assert next_state.shape == (2, 16, 5, 5)


@pytest.mark.parametrize(("layers", "offer"), [(4, "3 or 6"), (1, "3 or 6"), (20, "18 or 21")])
def test_layers_must_be_a_multiple_of_three(layers, offer):
    with pytest.raises(ConfigError, match=rf"model\.layers={layers} .*use {offer}"):
        AmoebaNetD(layers, 8, 2)


def test_layers_and_filters_are_told_together():
    with pytest.raises(ConfigError, match=r"model\.layers=4 .*; model\.filters=210 "):
        AmoebaNetD(4, 210, 2)


@pytest.mark.parametrize(("filters", "offer"), [(4, "8 or 12"), (210, "208 or 212")])
def test_filters_must_be_a_multiple_of_four(filters, offer):
    with pytest.raises(ConfigError, match=rf"model\.filters={filters} .*use {offer}"):
        AmoebaNetD(3, filters, 2)
