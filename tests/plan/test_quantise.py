"""Quantised plans: integers travel, what stays in float is named, wrong scales are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hires.core.config.run_config import from_dict, to_dict
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace_config
from hires.parallel.quantized_kernels import DIGITS
from hires.parallel.reductions import REDUCTIONS
from hires.plan.graph import Graph, Node
from hires.plan.passes.quantise import RULES, Quantiser
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.quant.affine import Affine
from tests.helpers.layouts import config_of
from tests.helpers.quantised_nets import QuantisedNet

INT8: dict[str, Any] = {"task": {"name": "infer"}, "precision": {"name": "int8"}}


@pytest.fixture(scope="module")
def scales(tmp_path_factory):
    """The file of scales of the network that ``config_of`` names."""
    config = config_of(**INT8)
    net = build_model(config.model, config.seed, (config.height, config.width))
    materialise(net, [*net.state_dict()], config.seed)
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    QuantisedNet(net, torch.rand(2, 3, config.height, config.width)).write(path)
    return path


def planned(path: Any, **keys: Any) -> Plan:
    config = config_of(**{**INT8, "quant": {"scales": str(path)}, **keys})
    return make_plan(config, trace_config(config))


@pytest.mark.parametrize(
    "parallel",
    [
        {"tiles": [2, 1]},
        {"tiles": [2, 2]},
        {"stages": 3},
        {"stages": 2, "tiles": [2, 1], "spatial_stages": 1},
    ],
)
def test_a_quarter_of_the_bytes_travels(scales, parallel):
    fp32 = planned(scales, precision={"name": "fp32"}, parallel=parallel)
    int8 = planned(scales, parallel=parallel)
    assert fp32.ok, fp32.findings
    assert int8.ok, int8.findings
    moved = {kind: one["bytes"] for kind, one in fp32.totals["by_kind"].items()}
    for kind, one in int8.totals["by_kind"].items():
        # Sums travel in fp32, which holds those of up to 256 x 256 pixels exactly.
        assert one["bytes"] * (1 if kind == "reduce" else 4) == moved[kind], kind


@pytest.mark.parametrize(("side", "parts"), [(256, 1), (257, 2)])
def test_sums_of_large_maps_travel_as_two_numbers(side, parts):
    pool = Node(
        "pool",
        "adaptive_avg_pool2d.default",
        {"self": {"value": "input"}, "output_size": [1, 1]},
        [1, 3, 1, 1],
        "float32",
    )
    graph = Graph([pool], "pool", [1, 3, side, side], {})
    q = Quantiser(graph, dict.fromkeys(("input", "pool"), Affine(0.1, 3)), {})
    q.as_integers("input")
    assert RULES["adaptive_avg_pool2d"](q, pool) == ""
    assert q.nodes[-1].args["parts"] == parts
    # The largest sum there can be, of two uneven tiles.
    x = torch.full((1, 1, side, side), 255, dtype=torch.uint8)
    facts: Any = SimpleNamespace(dims=[2, 3], keep=True, args=q.nodes[-1].args)
    sent = [REDUCTIONS["q_mean"].local(tile, facts) for tile in (x[:, :, :100], x[:, :, 100:])]
    assert sent[0].numel() == parts
    total = sum(one.double() for one in sent).flatten().tolist()
    assert sum(n * 2 ** (DIGITS * k) for k, n in enumerate(reversed(total))) == 255 * side**2


INPUT: dict[str, Any] = {"value": "input"}
FAR_APART: dict[str, dict[str, Any]] = {
    "add": {"self": INPUT, "other": INPUT},
    "mul": {"self": INPUT, "other": INPUT},
    "mul by a number": {"self": INPUT, "other": 2.0},
    "relu": {"self": INPUT},
    "avg_pool2d": {
        "self": INPUT,
        "kernel_size": [2, 2],
        "stride": [1, 1],
        "padding": [0, 0],
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    },
    "mean": {"self": INPUT, "dim": [2, 3], "keepdim": True},
    "upsample_bilinear2d": {"self": INPUT, "scale_factors": [1.0, 1.0]},
}
"""Operators whose factor is an argument, no tensor that ranks would look at."""


@pytest.mark.parametrize("name", FAR_APART)
def test_scales_whose_quotient_leaves_fp32_are_refused(name):
    """Each is a number of fp32; the kernel got 2 ** 240."""
    node = Node("y", f"{name.split()[0]}.default", FAR_APART[name], [1, 3, 8, 8], "float32")
    graph = Graph([node], "y", [1, 3, 8, 8], {})
    q = Quantiser(graph, {"input": Affine(2.0**120, 0), "y": Affine(2.0**-120, 0)}, {})
    q.as_integers("input")
    with pytest.raises(ConfigError, match=r"of input \(1.33e\+36\) and y \(7.52e-37\) are too far"):
        RULES[node.kind](q, node)


def test_plan_json_holds_the_quantised_network(scales):
    plan = planned(scales, parallel={"tiles": [2, 1]})
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.graph.nodes == plan.graph.nodes
    kinds = {node.kind for node in plan.graph.nodes}
    assert {"quantize", "q_conv2d", "q_mean", "q_linear"} <= kinds
    assert "conv2d" not in kinds


def test_without_fusion_norms_are_quantised_alone(scales):
    plan = planned(scales, engine={"fuse": "off"})
    assert plan.ok, plan.findings


def test_layers_that_are_kept_are_named(scales):
    plan = planned(scales, quant={"scales": str(scales), "keep": ["group2*", "fc"]})
    notes = [f.text for f in plan.findings if f.key == "precision"]
    assert "computed in fp32, not with 8-bit integers: fc (quant.keep=fc)" in notes
    assert plan.graph.by_name["fc"].kind == "linear"


def test_a_pattern_that_names_no_layer_is_refused(scales):
    with pytest.raises(ConfigError, match=r"quant\.keep=nosuch\* names no layer"):
        planned(scales, quant={"scales": str(scales), "keep": ["nosuch*"]})


def test_scales_of_another_network_are_refused(scales):
    with pytest.raises(ConfigError, match="another network"):
        planned(scales, model={"name": "resnet", "depth": 18, "classes": 4})


def test_training_is_refused():
    with pytest.raises(ConfigError, match="precision=int8 is for inference"):
        config_of(precision={"name": "int8"})


def test_compiling_numbers_of_8_bits_is_refused():
    with pytest.raises(
        ConfigError, match=r"engine\.compile=stage is for real numbers.*compile=off"
    ):
        config_of(**INT8, engine={"compile": "stage"})


def test_int8_without_scales_is_refused():
    config = from_dict(to_dict(config_of(**INT8)))
    with pytest.raises(ConfigError, match=r"needs the scales of a calibration"):
        make_plan(config, trace_config(config))


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_layers_whose_sums_32_bits_may_not_hold_stay_in_float(layer):
    """Else a sum that is too large comes out with another sign, and nothing says so."""
    channels = {7: 1353, 6: 1353}  # 7 x 7 x 1353 are 66,297 products, and 66,311 are the most
    for more, kept in ((0, False), (1, True)):
        net = nn.Sequential(layer(channels[7] + more, 2, 7, padding=3))
        made = QuantisedNet(net, torch.rand(1, channels[7] + more, 8, 8))
        assert ("it sums more products" in str(made.graph.kept)) is kept


class Padded(nn.Module):
    """A border far outside of what it surrounds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.pad(self.first(x).sigmoid(), (1, 1, 2, 2), value=self.value))


@pytest.mark.parametrize("value", [0.0, 0.5, 50.0, -3.0])
def test_a_border_keeps_its_value(value):
    made = QuantisedNet(Padded(value), torch.rand(2, 3, 12, 11))
    exact = made.float_values[made.float_graph.output]
    noise = (made.output() - exact).square().sum() / exact.square().sum()
    assert noise < 1e-3
    [pad] = [node for node in made.graph.nodes if "pad" in node.op]
    assert pad.dtype == ("uint8" if value in (0.0, 0.5) else "float32")
    assert torch.equal(made.output((2, 2)), made.output())
