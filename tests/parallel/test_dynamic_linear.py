"""Linear layers whose rows have scales of their own: every layout has the bits of one process."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hires.core.config.quant_config import LINEAR
from hires.nets.build_network import build_model, materialise
from hires.plan.passes.quantise import quantised
from hires.quant.packed_weights import pack, unpack
from hires.quant.scales import read_scales, write_scales
from tests.helpers.int8_cases import rows_by_definition
from tests.helpers.jobs import verify_each
from tests.helpers.layouts import config_of, given
from tests.helpers.linear_nets import mixer, transformer
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.ranks import run_ranks

MIXER = {
    "name": "custom",
    "target": "tests.helpers.linear_nets:mixer",
    "args": {"size": [31, 40]},
}
TRANSFORMER = {**MIXER, "target": "tests.helpers.linear_nets:transformer"}
RESNET = {"name": "resnet", "depth": 18, "classes": 4}
GEMS = {"stages": 2, "directions": 2, "schedule": "gems"}
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "a head, rows": (RESNET, {"tiles": [2, 1]}),
        "a head, stages": (RESNET, {"stages": 2}),
        "tokens, rows": (MIXER, {"tiles": [2, 1]}),
        "tokens, columns": (MIXER, {"tiles": [1, 2]}),
        "tokens, stages": (MIXER, {"stages": 2}),
        "tokens, a pipeline": (MIXER, {"stages": 2, "microbatches": 2}),
        "tokens, both directions": (MIXER, GEMS),
        "tokens, shards": (MIXER, {"local_dp": 2}),
        "tokens, replicas": (MIXER, {"replicas": 2}),
        "attention, a pipeline": (TRANSFORMER, {"stages": 2, "microbatches": 2}),
        "attention, both directions": (TRANSFORMER, GEMS),
        "attention, shards": (TRANSFORMER, {"local_dp": 2}),
    },
    3: {"tokens, three tiles": (MIXER, {"tiles": [3, 1]})},
    4: {
        "tokens, four tiles": (MIXER, {"tiles": [2, 2]}),
        "tokens, tiles in both directions": (
            MIXER, {**GEMS, "tiles": [2, 1], "stages": 3, "spatial_stages": 1},
        ),
    },
}  # fmt: skip
SIZE = (31, 40)
"""Patches of 3 x 3 leave a row and a column over; tiles have 10 rows by 13 columns of tokens."""


def layout(name: str, folder: Path, model: Any, parallel: Any, linear: str, weights: str) -> Any:
    """Returns a layout as ranks take it, with scales of what no linear layer reads alone."""
    own: dict[str, Any] = {"task": {"name": "infer"}, "precision": {"name": "int8"}}
    own |= {"parallel": parallel, "model": model, "image": [*SIZE]}
    config = config_of(**own)
    net = build_model(config.model, config.seed, SIZE)
    materialise(net, [*net.state_dict()], config.seed)
    made = QuantisedNet(net, torch.rand(2, 3, *SIZE), linear=linear)
    file = folder / f"{name}.json"
    made.write(file)
    if linear == "dynamic":
        scales, graph = read_scales(file), made.float_graph
        inputs = {n.inputs[0] for n in graph.nodes if n.kind in ("linear", "fused_linear")}
        values = {n: one for n, one in scales.values.items() if n not in inputs}
        ranges = {n: scales.ranges[n] for n in values}
        assert len(values) < len(scales.values)
        write_scales(file, dataclasses.replace(scales, values=values, ranges=ranges))
    own["quant"] = {"scales": str(file), "linear": linear, "weights": weights}
    return given(name, folder, config_of(**own))


@pytest.mark.dist
def test_static_linear_layers_of_tokens_have_them_too(tmp_path):
    """Their packed weights are those for the tokens of a tile, which are fewer than the image's."""
    wanted = [layout("rows", tmp_path, MIXER, {"tiles": [2, 1]}, "static", "int8")]
    assert run_ranks(verify_each, 2, wanted)[0] == {"rows": 0.0}


@functools.cache
def net_of(name: str, linear: str = "dynamic", weights: str = "int8") -> QuantisedNet:
    torch.manual_seed(2)
    net = mixer(SIZE) if name == "mixer" else transformer(SIZE)
    return QuantisedNet(net, torch.rand(2, 3, *SIZE), weights=weights, linear=linear)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixer", "transformer"])
def test_layers_have_the_bits_of_the_definition_on_their_rounded_weights(name, weights):
    net = net_of(name, weights=weights)
    made, count, packed = net.run(net.graph)[0], 0, 0
    for node in net.graph.nodes:
        if node.kind != "q_dynamic_linear":
            continue
        layer = net.net.get_submodule(node.layer)
        weight, count = layer.weight.detach().double(), count + 1
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round()
        if weights == "int4" and weight.shape[1] >= 64:
            numbers, packed = unpack(pack(numbers.to(torch.int8)), [*numbers.shape]), packed + 1
        multiplier = scale.flatten().float()
        offset = -(numbers.double().sum(1) * multiplier).float()
        args = numbers[..., None, None], multiplier, offset, layer.bias
        x = made[node.args["input"]["value"]]
        assert torch.equal(made[node.name], rows_by_definition(x, *args)), node.name
    assert (count, packed) == (5, int(name == "mixer" and weights == "int4"))


@pytest.mark.parametrize("name", ["mixer", "transformer"])
def test_output_is_as_near_that_in_float_as_with_static_scales(name):
    exact = net_of(name).float_values[net_of(name).float_graph.output]
    errors = {how: float((net_of(name, how).output() - exact).abs().max()) for how in LINEAR}
    assert 0 < errors["dynamic"] < max(1.5 * errors["static"], 0.02 * float(exact.abs().max()))


def test_what_has_no_rule_stays_in_float_with_the_reason():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return F.linear(x, self.fc.weight, x.mean((0, 1)) * self.fc.bias) + self.fc(x)

    for linear in LINEAR:
        kept = QuantisedNet(Odd(), torch.rand(2, 3, 2, 2), linear=linear).graph.kept
        assert "its bias is computed" in kept.values(), kept
    graph = QuantisedNet(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), torch.rand(2, 3, 2, 2))
    graph = graph.float_graph
    weight = next(n.args["weight"]["param"] for n in graph.nodes if "linear" in n.kind)
    graph.params[weight].shape = [5, 66312]  # the largest sums are 2^31 or more
    assert "it sums more products than 32 bits hold" in quantised(graph, {}, {}).kept.values()
    graph.params[weight].shape = [5, 66311]
    assert not quantised(graph, {}, {}, linear="dynamic").kept


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_has_the_bits_of_one_process(tmp_path, ranks):
    wanted = [
        layout(name, tmp_path, *which, "dynamic", "int8") for name, which in LAYOUTS[ranks].items()
    ]
    for _, _, plan, _ in wanted:
        kinds = [node["op"] for node in plan["graph"]["nodes"]]
        assert "q_dynamic_linear.default" in kinds
        assert "q_linear.default" not in kinds
    errors = run_ranks(verify_each, ranks, wanted)[0]
    assert errors == dict.fromkeys(LAYOUTS[ranks], 0.0)
