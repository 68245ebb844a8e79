"""What a tile's windowed operation reads."""

from __future__ import annotations

import torch

from hires.comm import rehearsal
from hires.engine.build import contexts_of
from hires.parallel.window import Window
from tests.helpers.layouts import config_of, plan_of


def test_strided_convolution_needs_no_crop_of_what_it_passes_over():
    # A crop's gradient is a copy of the whole tile: 2 % of a training step of a ResNet-101.
    parallel = {"tiles": [2, 1]}
    plan = plan_of(
        config_of(image=[64, 64], model={"name": "resnet", "classes": 4}, parallel=parallel)
    )
    node = plan.graph.by_name["layer2.0.downsample.0"]
    for rank in range(2):
        with rehearsal(rank, shared_memory=True):
            [context] = contexts_of(plan, rank)
            window = Window(node, context, None)
        r0, r1, c0, c1 = window.held
        x = torch.randn(1, 64, r1 - r0, c1 - c0, requires_grad=True)
        weight = torch.randn(128, 64, 1, 1)
        y = window(x, None, {**node.args, "weight": weight, "bias": None})
        assert torch.equal(y, torch.conv2d(x, weight, stride=2))
        assert y.grad_fn is not None
        assert y.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
