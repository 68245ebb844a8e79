"""First weights depend on the seed and the layer's name, and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import NETS, build_model, first_values, materialise

SMALL = ModelConfig(name="preact_resnet", n=1, classes=4)


def state(
    names: list[str] | None = None, seed: int = 0, config: ModelConfig = SMALL
) -> dict[str, Tensor]:
    """The named tensors of a freshly made network, or all of them."""
    model = build_model(config, seed)
    materialise(model, list(model.state_dict()) if names is None else names, seed)
    return {name: t for name, t in model.state_dict().items() if not t.is_meta}


def test_network_takes_no_memory_until_it_is_filled():
    assert all(tensor.is_meta for tensor in build_model(SMALL, 0).state_dict().values())


def test_part_of_the_network_gets_the_values_of_the_whole():
    whole = state()
    for name in whole:
        part = state([name])
        assert name in part
        assert len(part) < 6, "only the layer of that name is filled"
        assert all(torch.equal(tensor, whole[key]) for key, tensor in part.items())


def test_order_of_filling_does_not_matter():
    names = list(state())
    model = build_model(SMALL, 0)
    for name in reversed(names):
        materialise(model, [name], 0)
    whole = state()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


def test_layers_and_seeds_differ():
    one, other = state(seed=1), state(seed=2)
    weights = [name for name in one if "conv" in name]
    assert not any(torch.equal(one[name], other[name]) for name in weights)
    alike = state(config=ModelConfig(name="preact_resnet", n=2, classes=4))
    assert alike["group1.0.conv2.weight"].shape == alike["group1.1.conv2.weight"].shape
    assert not torch.equal(alike["group1.0.conv2.weight"], alike["group1.1.conv2.weight"])


def test_convolutions_begin_as_he_et_al_draw_them():
    # Normal of variance 2 / (outputs of one weight): 3x3 pixels times 64 channels.
    weight = state(config=ModelConfig(depth=18, classes=2))["layer1.0.conv1.weight"]
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    stem = state(["conv1.weight"], config=ModelConfig(depth=18, classes=2))["conv1.weight"]
    assert stem.std().item() == pytest.approx((2 / (49 * 64)) ** 0.5, rel=0.05)


def test_number_of_classes_changes_the_classifier_only():
    few, many = state(), state(config=ModelConfig(name="preact_resnet", n=1, classes=9))
    assert [name for name in few if not torch.equal(few[name], many[name])] == [
        "fc.weight",
        "fc.bias",
    ]


def test_seed_of_torch_is_neither_read_nor_changed():
    torch.manual_seed(3)
    first, after = state(), torch.rand(3)
    torch.manual_seed(4)
    again = state()
    assert all(torch.equal(first[name], again[name]) for name in first)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after)


def test_norms_begin_as_the_identity():
    values = state()
    assert torch.equal(values["bn.weight"], torch.ones(256))
    assert torch.equal(values["bn.running_var"], torch.ones(256))
    assert not values["bn.bias"].any()
    assert not values["bn.running_mean"].any()
    assert values["bn.num_batches_tracked"] == 0


def test_custom_network_comes_filled_and_equal_for_a_seed():
    config = ModelConfig(name="custom", target="tests.helpers.custom_nets:zoo")
    before = torch.random.get_rng_state()
    one, again, other = (build_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["stem.weight"], other["stem.weight"])
    net = build_model(config, 1)
    materialise(net, list(one), 7)
    assert all(torch.equal(one[name], tensor) for name, tensor in net.state_dict().items())


class Scale(nn.Module):
    """A layer of a kind that hires does not list."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((3, 1, 1), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def scaled(monkeypatch: pytest.MonkeyPatch, layer: type[Scale]) -> dict[str, Tensor]:
    """Returns the state of a network that was registered here."""
    make = lambda: nn.Sequential(nn.Conv2d(3, 3, 1), layer(1e-6))  # noqa: E731
    monkeypatch.setitem(NETS._items, "scaled", make)
    return state(config=ModelConfig(name="scaled"))


def test_parameter_of_a_layer_without_reset_keeps_its_own_first_values(monkeypatch):
    values, again = (scaled(monkeypatch, Scale) for _ in range(2))
    assert torch.equal(values["1.gamma"], torch.full((3, 1, 1), 1e-6))
    assert all(torch.equal(values[name], tensor) for name, tensor in again.items())


def test_first_values_that_are_registered_or_reset_are_drawn_by_name(monkeypatch):
    class Resetting(Scale):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.gamma)

    class Listed(Scale):
        pass

    @first_values.register(Listed)
    def _ones(module: Listed) -> None:
        nn.init.ones_(module.gamma)

    drawn = scaled(monkeypatch, Resetting)["1.gamma"]
    assert torch.equal(drawn, scaled(monkeypatch, Resetting)["1.gamma"])
    assert drawn.std() > 0
    assert torch.equal(scaled(monkeypatch, Listed)["1.gamma"], torch.ones(3, 1, 1))


def drawn_elsewhere() -> nn.Module:
    """A network whose first weights come from Python and NumPy."""
    net = nn.Linear(2, 1)
    net.weight.data[0] = torch.tensor([random.random(), np.random.rand()])
    return net


def test_network_draws_the_same_of_python_and_numpy_in_every_process():
    # Each rank builds it: two tiles had other weights.
    config = ModelConfig(name="custom", target=f"{__name__}:drawn_elsewhere")
    before = random.getstate()
    one, again, other = (build_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert random.getstate() == before
    assert torch.equal(one["weight"], again["weight"])
    assert not torch.isclose(one["weight"], other["weight"]).any()
