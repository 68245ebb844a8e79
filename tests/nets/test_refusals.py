"""A network that computes what no graph holds is refused where it is traced."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError
from hires.engine.torch_server import reply_to
from hires.nets import trace as tracing
from hires.nets.refusals import refuse_gradient_hooks
from hires.nets.trace import trace

SHAPE = [2, 3, 12, 14]


class Straight(torch.autograd.Function):
    """A sign with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x - 0.3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Middle(nn.Module):
    """A classifier with some computation in its middle."""

    def __init__(self, middle: Any = None, **parts: Any) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.middle = middle or (lambda net, x: Straight.apply(x))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self, F.relu(self.norm(self.conv1(x))))
        return self.head(self.conv2(x).mean((2, 3)))


def hooked(net: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(-1e3, 1e3))
    return x


class Counts(nn.Module):
    """A state outside of the buffers."""

    calls = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def rare(draw: Any) -> Middle:
    """A block that is left out at random, so rarely that calls agree by chance."""
    return Middle(lambda net, x: x * 2 if draw() < 1e-9 else x)


RARE = "random numbers of Python or NumPy"
REFUSED = {
    "function": (lambda: Middle(), "has autograd.Function Straight, which may change the gradient"),
    "tensor hook": (lambda: Middle(hooked), "has a hook on a tensor (register_hook)"),
    "state": (
        lambda: Middle(lambda net, x: net.counts(x), counts=Counts()),
        "changes its attribute counts.calls",
    ),
    "random": (lambda: rare(random.random), RARE),
    "seeded": (lambda: rare(random.Random(3).random), RARE),
    "numpy": (lambda: rare(np.random.default_rng(3).random), RARE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_network_whose_graph_would_compute_something_else_is_refused(case):
    make, words = REFUSED[case]
    net = make()
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        trace(net, SHAPE, training=True)
    assert "\n" not in str(caught.value)
    trace(net, SHAPE, training=True, trusted=True)
    if "hook" in case or "function" in case:  # the forward pass is the same
        trace(net, SHAPE, training=False)


def test_running_mean_of_all_batches_is_refused_by_the_name_of_its_layer():
    net = Middle(lambda net, x: x, norm=nn.BatchNorm2d(8, momentum=None))
    with pytest.raises(ConfigError, match=r"the layer norm .* is a BatchNorm2d with momentum=None"):
        trace(net, SHAPE, training=True)
    trace(net, SHAPE, training=False)
    net.norm = nn.BatchNorm2d(8, momentum=None, track_running_stats=False)
    trace(net, SHAPE, training=True)


def test_hooks_on_gradients_are_refused():
    for part, kind, words in (
        ("conv2", "full_backward_hook", "a backward hook on conv2, which may change"),
        ("conv2", "full_backward_pre_hook", "a backward hook on conv2, which may change"),
        # On a rank it would see a part of the gradient.
        ("weight", "hook", "has a gradient hook on its parameter conv1.weight"),
        ("weight", "post_accumulate_grad_hook", "on its parameter conv1.weight"),
    ):
        net = Middle()
        owner = net.conv1.weight if part == "weight" else net.conv2
        getattr(owner, f"register_{kind}")(lambda *values: None)
        with pytest.raises(ConfigError, match=re.escape(words)):
            refuse_gradient_hooks(net)


def test_network_that_is_what_its_graph_is_passes():
    def estimator(net: Any, x: Tensor) -> Tensor:  # a gradient of its own, in operators
        x = x + (torch.sign(x - 0.3) - x).detach()
        return checkpoint(net.part, F.dropout(x, 0.3), use_reentrant=True)

    part = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.4))
    for net in (Middle(estimator, part=part), nn.utils.parametrizations.spectral_norm(Plain())):
        trace(net, SHAPE, training=True)


class Plain(nn.Conv2d):
    """A layer on images."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)


def test_trusted_network_is_traced_for_the_front_end(monkeypatch):
    traced, export = [], tracing.export_network
    monkeypatch.setattr(
        tracing, "export_network", lambda *args: traced.append(args[1]) or export(*args)
    )
    model = ModelConfig("custom", target=f"{__name__}:Middle", classes=5)
    config = RunConfig(image=SHAPE[2:], batch=2, model=model)
    assert "model.trusted=true" in reply_to({"trace": to_dict(config)})["error"]["text"]
    assert len(traced) == 1
    config.model.trusted = True
    assert reply_to({"trace": to_dict(config)})["tensors"][0] == "conv1.weight"
