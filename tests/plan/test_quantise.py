"""Quantised plans: integers travel, what stays in float is named, tables are exact."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace_config
from hires.parallel.quantized_kernels import DIGITS
from hires.parallel.reductions import REDUCTIONS
from hires.plan.graph import Graph, Node
from hires.plan.operators.formulas import FUNCTIONS, function_of, unfused
from hires.plan.passes.int8_arithmetic import inputs_that_count, table_of
from hires.plan.passes.int8_state import Quantiser
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.quant.affine import Affine, affine_of
from tests.helpers.layouts import config_of
from tests.helpers.quantised_nets import QuantisedNet
from tests.helpers.small_plans import by_kind

INPUT: dict[str, Any] = {"value": "input"}
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


def test_a_quarter_of_the_bytes_travels(scales):
    for parallel in ({"tiles": [2, 2]}, {"stages": 2, "tiles": [2, 1], "spatial_stages": 1}):
        fp32 = planned(scales, precision={"name": "fp32"}, parallel=parallel)
        int8 = planned(scales, parallel=parallel)
        assert fp32.ok, fp32.findings
        assert int8.ok, int8.findings
        moved = by_kind(fp32)
        for kind, (_, num_bytes) in by_kind(int8).items():
            # Sums travel in fp32, which holds those of up to 256 x 256 pixels exactly.
            assert num_bytes * (1 if kind == "reduce" else 4) == moved[kind][1], kind


def quantiser(name: str, args: dict[str, Any], shape: list[int], size: int, *affines: Affine):
    """A node behind the input, its graph's quantiser, and whether it has a rule."""
    node = Node("y", f"{name}.default", args, shape, "float32")
    graph = Graph([node], "y", [1, 3, size, size], {})
    q = Quantiser(graph, dict(zip(("input", "y"), affines, strict=True)), {})
    q.integers("input")
    return q, q.tried(node)


@pytest.mark.parametrize(("side", "parts"), [(256, 1), (257, 2)])
def test_sums_of_large_maps_travel_as_two_numbers(side, parts):
    args, affines = {"self": INPUT, "output_size": [1, 1]}, [Affine(0.1, 3)] * 2
    q, refused = quantiser("adaptive_avg_pool2d", args, [1, 3, 1, 1], side, *affines)
    assert refused == ""
    assert q.nodes[-1].args["parts"] == parts
    # The largest sum there can be, of two uneven tiles.
    x = torch.full((1, 1, side, side), 255, dtype=torch.uint8)
    facts: Any = SimpleNamespace(dims=[2, 3], keep=True, args=q.nodes[-1].args)
    sent = [REDUCTIONS["q_mean"].local(tile, facts) for tile in (x[:, :, :100], x[:, :, 100:])]
    assert sent[0].numel() == parts
    total = sum(one.double() for one in sent).flatten().tolist()
    assert sum(n * 2 ** (DIGITS * k) for k, n in enumerate(reversed(total))) == 255 * side**2


FAR_APART: dict[str, dict[str, Any]] = {
    "add": {"self": INPUT, "other": INPUT},
    "mul": {"self": INPUT, "other": INPUT},
    "mul by a number": {"self": INPUT, "other": 2.0},
    "relu": {"self": INPUT},
    "mean": {"self": INPUT, "dim": [2, 3], "keepdim": True},
    "upsample_bilinear2d": {"self": INPUT, "scale_factors": [1.0, 1.0]},
}
"""Operators whose factor is an argument, no tensor that ranks would look at."""


def test_scales_whose_quotient_leaves_fp32_are_refused():
    """Each is a number of fp32; the kernel got 2 ** 240."""
    far = Affine(2.0**120, 0), Affine(2.0**-120, 0)
    for name, args in FAR_APART.items():
        with pytest.raises(ConfigError, match=r"scales of y and of what it reads are too far"):
            quantiser(name.split()[0], args, [1, 3, 8, 8], 8, *far)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_layers_whose_sums_32_bits_may_not_hold_stay_in_float(layer):
    """Else a sum that is too large comes out with another sign, and nothing says so."""
    # 7 x 7 x 1353 are 66,297 products, and 66,311 are the most.
    for channels, kept in ((1353, False), (1354, True)):
        net = QuantisedNet(
            nn.Sequential(layer(channels, 2, 7, padding=3)), torch.rand(1, channels, 8, 8)
        )
        assert ("it sums more products" in str(net.graph.kept)) is kept


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


ACTIVATIONS = [
    *([name] for name in FUNCTIONS if name not in ("leaky_relu", "gelu")),
    ["leaky_relu", 0.1], ["leaky_relu", -0.2], ["gelu", "none"], ["gelu", "tanh"],
]  # fmt: skip


RANGES = [(0.0, 1.0), (-0.28, 6.0), (-1.0, 0.9), (-3.0, 0.0), (0.0, 200.0), (-40.0, 0.01)]


def test_a_table_has_the_numbers_of_float64():
    source, to = affine_of(-4.0, 5.0), affine_of(-0.7, 4.2)
    real = (torch.arange(256, dtype=torch.float64) - source.zero_point) * source.scale
    for activation in ACTIVATIONS:
        name, args = unfused(activation, {"value": "x"})
        del args["self"]
        y = getattr(torch.ops.aten, name)(real, **args) / to.scale
        expected = (y.round() + to.zero_point).clamp(0, 255)
        table = torch.tensor(table_of(activation, source, to), dtype=torch.float64)
        near_half = ((y - y.floor()) - 0.5).abs() < 1e-9
        assert torch.equal(table[~near_half], expected[~near_half]), activation


def test_inputs_beyond_the_range_have_the_number_of_its_end():
    for ends, activation in itertools.product(RANGES, ACTIVATIONS):
        to, function = affine_of(*ends), function_of(activation)
        source = inputs_that_count(function, to)
        table = table_of(activation, source, to)
        # An end is a number, up to half a step from where the values stop to change; no slope is
        # above 1.14 (GELU, sqrt(2)).
        most = 1 + 1.14 * source.scale / 2 / to.scale
        for real, number in ((source.real(0), table[0]), (source.real(255), table[255])):
            for times in (1.0, 1.5, 4.0, 100.0, 1e6):
                off = abs(to.quantized(function(times * real)) - number)
                assert off <= most, (activation, real, times)


def test_int8_runs_that_mean_nothing_are_refused(scales):
    plan = planned(scales, quant={"scales": str(scales), "keep": ["group2*", "fc"]})
    notes = [f.text for f in plan.findings if f.key == "precision"]
    assert "computed in fp32, not with 8-bit integers: fc (quant.keep=fc)" in notes
    assert plan.graph.by_name["fc"].kind == "linear"
    other = {"name": "preact_resnet", "depth": 20, "classes": 4}
    empty = Graph([], "input", [1, 3, 8, 8], {})
    for error, refused in (
        ("keep=nosuch", lambda: planned(scales, quant={"scales": str(scales), "keep": ["nosuch"]})),
        ("another network", lambda: planned(scales, model=other)),
        ("int8 is for task=infer", lambda: config_of(precision={"name": "int8"})),
        ("compile=off", lambda: config_of(**INT8, engine={"compile": "stage"})),
        ("needs the scales of a calibration", lambda: make_plan(config_of(**INT8), empty)),
    ):
        with pytest.raises(ConfigError, match=error):
            refused()
