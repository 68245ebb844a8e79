"""Is a quantised network with explicit roundings within a step of hires' own kernels?"""

from __future__ import annotations

import collections
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hires.engine.build import place_tensors
from hires.engine.derived_tensors import DerivedTensors
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.explicit_int8 import EXPLICIT, explicit_operator
from hires.plan.graph import INPUT, Node
from hires.plan.plan import Plan
from hires.quant.explicit_ops import dequantize, quantize, signed
from tests.helpers.quantised_nets import small_quantised
from tests.helpers.simulated_tiles import laid_out
from tests.helpers.small_nets8 import SIZES

NETS = sorted(SIZES)


@functools.cache
def compared(name: str) -> dict[str, tuple[str, float]]:
    """Returns kind and largest difference of each node, from hires' own inputs of it."""
    net = small_quantised(name)
    own = net.run(net.graph)[0]
    graph, stage = laid_out(net.graph, (1, 1))
    plan = Plan(graph, [stage], [], 1, 1, False, "float32", [["F0"]])
    group: Any = SimpleNamespace(ranks=[0], shared=None)
    context = Context(plan, 0, collections.defaultdict(lambda: group), Cursor([], {}))
    derived = DerivedTensors([context], net.own).tensors
    place_tensors(derived, torch.float32, graph)
    tensors = {**net.own, **derived}
    values = {INPUT: net.x, **own}
    numbers = {n: signed(v) if _is_numbers(v) else v for n, v in values.items()}
    found = {}
    with torch.no_grad():
        for node in graph.nodes:
            run = explicit_operator(node, context, tensors, compile_node(node, context, tensors))
            made, expected = run(dict(numbers)), own[node.name]
            if _is_numbers(expected):
                assert made.dtype == torch.int8, node.name
                off = float((signed(made).int() - expected.int()).abs().max())
                found[node.name] = node.kind, off
            elif isinstance(expected, Tensor):
                off = float((made - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
                found[node.name] = f"real {node.kind}", off
    return found


def _is_numbers(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


@pytest.mark.parametrize("name", NETS)
def test_each_layer_is_within_one_step_of_ours(name):
    found = compared(name)
    assert len(found) > 8
    for node, (kind, off) in found.items():
        assert off <= (1e-5 if kind.startswith("real") else 1), (node, kind, off)


def test_every_operator_is_tried():
    kinds = {kind for name in NETS for kind, _ in compared(name).values()}
    assert {kind.removeprefix("real ") for kind in kinds} >= {*EXPLICIT} - {"avg_pool2d"}


def test_numbers_round_to_even_and_saturate():
    x = torch.tensor([0.5, 1.5, -0.5, -2.5, 127.4, 200.0, -128.4, -900.0])
    assert quantize(x).tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
    q = torch.tensor([[-128, 0], [1, 127]], dtype=torch.int8)
    assert dequantize(q, torch.tensor(0.5)).tolist() == [[-64.0, 0.0], [0.5, 63.5]]
    by_row = dequantize(q, torch.tensor([1.0, 2.0]))
    assert by_row.tolist() == [[-128.0, 0.0], [2.0, 254.0]]


def test_signed_numbers_are_128_below_and_come_back():
    numbers = torch.arange(256, dtype=torch.uint8)
    assert signed(numbers).tolist() == [*range(-128, 128)]
    assert torch.equal(signed(signed(numbers)), numbers)


def test_average_pool_divides_as_torch_does():
    how: dict[str, Any] = {"padding": [1, 1], "ceil_mode": False, "count_include_pad": False}
    args = {"self": {"value": "x"}, "kernel_size": [3, 3], "stride": [2, 2], **how}
    args["divisor_override"] = None
    node = Node("pool", "avg_pool2d.default", args, [1, 2, 4, 5], "float32")
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    x = torch.rand(1, 2, 7, 9)
    made = explicit_operator(node, context, {}, lambda values: None)({"x": x})
    assert torch.equal(made, F.avg_pool2d(x, 3, 2, **how))
