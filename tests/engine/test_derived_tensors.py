"""A rewritten network computes what the network itself computes, in float64."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hires.comm import rehearsal
from hires.core.config.run_config import RunConfig
from hires.engine import derived_tensors
from hires.engine.build import build_rank, whole_model
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.loader import whole_microbatches
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.plan.plan import Plan
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.simulated_tiles import laid_out


def inference(seed: int, **keys: Any) -> RunConfig:
    target = "tests.helpers.random_nets:composed"
    model = {"name": "custom", "target": target, "classes": 4, "args": {"seed": seed}}
    return config_of(model=model, task={"name": "infer"}, **keys)


def outputs(config: RunConfig) -> list[Tensor]:
    with rehearsal(0), torch.no_grad():
        engine = build_rank(config, plan_of(config), 0, 1)
        made = engine.executor.step(engine.loaders, keep_outputs=True).outputs
        engine.close()
    return [made[key] for key in sorted(made)]


@pytest.mark.parametrize("seed", [0, 3])
def test_random_networks_are_the_same_fused_and_not(seed: int):
    config = inference(seed)
    model = whole_model(config)
    with torch.no_grad():
        expected = [model(images) for images, _ in whole_microbatches(config, 0)]
    for fuse in ("auto", "off"):
        config.engine.fuse = fuse
        for got, wanted in zip(outputs(config), expected, strict=True):
            assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.fixture(scope="module")
def quantised() -> QuantisedNet:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(8, 6, 4, stride=2),
        torch.nn.Conv2d(6, 4, 3, groups=2),
    )
    return QuantisedNet(net, torch.rand(2, 3, 12, 12))


def context_of(net: QuantisedNet) -> Context:
    graph, stage = laid_out(net.graph, (1, 1))
    group: Any = SimpleNamespace(ranks=[0], shared=None)
    plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]])
    return Context(plan, 0, defaultdict(lambda: group), Cursor([], {}))


def test_layers_in_pieces_have_the_numbers_of_plain_arithmetic(quantised, monkeypatch):
    whole = DerivedTensors([context_of(quantised)], quantised.own).tensors
    monkeypatch.setattr(derived_tensors, "PIECE_ELEMENTS", 1)  # a row at a time
    rows = DerivedTensors([context_of(quantised)], quantised.own).tensors
    for name, tensor in whole.items():
        assert torch.equal(tensor, rows[name]), name
    # From the formulas of hires.engine.derived_tensors, all at once.
    graph, own = quantised.graph, {n: t.detach().double() for n, t in quantised.own.items()}
    scale = own["1.weight"] / (own["1.running_var"] + 1e-5).sqrt()
    weight = own["0.weight"] * scale.view(-1, 1, 1, 1)
    bias = own["1.bias"] - own["1.running_mean"] * scale
    steps = weight.abs().amax((1, 2, 3)) / 127
    numbers = (weight / steps.view(-1, 1, 1, 1)).round()
    [node] = [n for n in graph.nodes if n.kind == "q_conv2d" and n.args["groups"] == 1][:1]
    made = {part: whole[node.args[part]["param"]] for part in ("weight", "multiplier", "offset")}
    assert torch.equal(made["weight"].double(), numbers)
    facts = graph.params[node.args["offset"]["param"]].recipe
    factor = graph.params[node.args["multiplier"]["param"]].recipe["factor"]
    assert torch.allclose(made["multiplier"].double(), steps * factor, rtol=1e-7)
    offset = facts["add"] + bias * facts["bias_factor"]
    offset -= facts["zero_point"] * numbers.sum((1, 2, 3)) * made["multiplier"].double()
    assert torch.allclose(made["offset"].double(), offset, rtol=1e-6)
