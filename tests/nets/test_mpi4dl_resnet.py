"""The network is MPI4DL's: its counts, its names, and what it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace

PUBLISHED = {1: 466_384, 2: 1_077_168, 6: 3_520_304, 12: 7_185_008}
"""n -> parameters of the original at 32x32 with 10 classes, its unused norms included."""


def network(n: int, image: tuple[int, int] = (32, 32), **keys: object) -> nn.Module:
    config = ModelConfig(name="mpi4dl_resnet", **{"n": n, "classes": 10, **keys})
    return build_model(config, seed=0, image=image)


def filled(n: int, image: tuple[int, int] = (32, 32), **keys: object) -> nn.Module:
    model = network(n, image, **keys)
    materialise(model, list(model.state_dict()), seed=0)
    return model.double()


@pytest.mark.parametrize("head", ["pool", "flatten"])
@pytest.mark.parametrize("n", PUBLISHED)
def test_parameters_are_those_of_the_original(n, head):
    assert sum(p.numel() for p in network(n, head=head).parameters()) == PUBLISHED[n]


def test_names_are_those_of_the_original():
    names = list(network(2).state_dict())
    weights = [name for name in names if name.endswith("conv1.weight")]
    blocks = {2: "r1 r2 r3 r4", 3: "r1 r2 r3", 4: "r1 r2 r3 r4", 5: "r1 r2 r3"}
    blocks |= {6: "r1 r2 r3 r4", 7: "r1 r2 r3"}
    expected = [f"{k}.{r}.conv1.weight" for k, layers in blocks.items() for r in layers.split()]
    assert weights == ["1.conv1.weight", *expected]
    assert names[-2:] == ["8.fc1.weight", "8.fc1.bias"]
    assert {"2.r1.batch_first.weight", "8.batch_last.running_mean"} <= set(names)


def reference(values: dict[str, Tensor], n: int, x: Tensor) -> Tensor:
    """What the original's ``get_resnet_v2`` computes up to its softmax, norms in training."""

    def norm(name: str, x: Tensor) -> Tensor:
        weight, bias = values[f"{name}.weight"], values[f"{name}.bias"]
        return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = values[f"{name}.conv1.weight"]
        padding = (weight.shape[-1] - 1) // 2
        return F.conv2d(x, weight, values[f"{name}.conv1.bias"], stride, padding)

    x = norm("1.batch_last", conv("1", x))
    for block in range(3 * n):
        name, first = f"{block + 2}", block % n == 0
        stride = 2 if first and block else 1
        y = x if block == 0 else norm(f"{name}.r1.batch_first", x)
        y = conv(f"{name}.r1", y, stride)
        y = conv(f"{name}.r2", norm(f"{name}.r2.batch_first", y))
        y = conv(f"{name}.r3", norm(f"{name}.r3.batch_first", y))
        x = (conv(f"{name}.r4", x, stride) if first else x) + y
    end = f"{3 * n + 2}"
    x = F.avg_pool2d(norm(f"{end}.batch_last", x), 8).flatten(1)
    return F.linear(x, values[f"{end}.fc1.weight"], values[f"{end}.fc1.bias"])


@pytest.mark.parametrize(("image", "classes"), [((32, 32), 10), ((64, 96), 5)])
def test_flattened_head_computes_what_the_original_does(image, classes):
    model = filled(2, image, head="flatten", classes=classes)
    x = torch.randn(2, 3, *image, dtype=torch.float64)
    expected = reference(dict(model.named_parameters()), 2, x)
    torch.testing.assert_close(model.train()(x), expected, rtol=1e-12, atol=1e-12)


def test_heads_agree_where_the_last_map_is_one_window():
    pool, flatten = filled(1), filled(1, head="flatten")
    flatten.load_state_dict(pool.state_dict())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(pool.train()(x), flatten.train()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("image", [(32, 32), (75, 61), (13, 128)])
def test_pooled_head_takes_any_image(image):
    model = network(1, (256, 256), classes=7, channels=4)
    assert model(torch.empty(2, 4, *image, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("image", [(33, 61), (125, 95)])
def test_flattened_head_follows_the_image(image):
    model = network(1, image, head="flatten")
    assert model(torch.empty(2, 3, *image, device="meta")).shape == (2, 10)


def test_image_without_a_window_is_refused():
    with pytest.raises(ConfigError, match=r"image=\[28, 64\] leaves fewer; use image=32 or more"):
        network(1, (28, 64), head="flatten")


@pytest.mark.slow
def test_operations_are_five_times_those_of_the_other_family():
    # 110.6 GFLOP for an image of 256x256, which is what makes the thesis's speeds plausible.
    flops = {
        name: sum(
            node.flops
            for node in trace(
                build_model(ModelConfig(name=name, n=12, classes=10), 0), [1, 3, 256, 256], False
            ).nodes
            if node.kind in ("conv2d", "linear")
        )
        for name in ("mpi4dl_resnet", "preact_resnet")
    }
    assert flops["mpi4dl_resnet"] == pytest.approx(110.6e9, rel=0.01)
    assert flops["mpi4dl_resnet"] / flops["preact_resnet"] == pytest.approx(5.3, abs=0.1)


def test_network_returns_logits_of_the_size_of_ones():
    graph = trace(network(1), [2, 3, 32, 32], training=True)
    assert graph.nodes[-1].kind == "linear"
    with torch.no_grad():
        output = filled(2).train()(torch.randn(4, 3, 48, 48, dtype=torch.float64))
    assert 0.05 < output.std() < 5
