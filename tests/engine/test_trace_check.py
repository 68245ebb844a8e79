"""The graph of a user's network is compared with its module before anything runs."""

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
from hires.engine.build import place_tensors
from hires.engine.footprint import reply_to
from hires.engine.trace_check import check_trace
from hires.nets.trace import trace
from hires.plan.graph import Graph
from tests.helpers.custom_nets import Cells, Scaled

SHAPE = [2, 3, 12, 14]


def function(forward: Any, backward: Any) -> Any:
    def run(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return forward(x)

    def turn(ctx: Any, grad: Tensor) -> Tensor:
        return backward(grad, *ctx.saved_tensors)

    methods = {"forward": staticmethod(run), "backward": staticmethod(turn)}
    return type("Own", (torch.autograd.Function,), methods)


straight_through = function(lambda x: torch.sign(x - 0.3), lambda grad, x: grad)
# Nothing is clipped in the first trial.
wide_clip = function(lambda x: x.clamp(-9, 9), lambda grad, x: grad)
gradient_clip = function(lambda x: x * 1.0, lambda grad, x: grad.clamp(-9, 9))
swish = function(
    lambda x: x * torch.sigmoid(x),
    lambda grad, x: grad * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),
)


class Middle(nn.Module):
    """A classifier with some computation in its middle."""

    def __init__(self, middle: Any = None, **parts: Any) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.middle = middle or (lambda net, x: x)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self, F.relu(self.norm(self.conv1(x))))
        return self.head(self.conv2(x).mean((2, 3)))


def of_function(own: Any) -> Middle:
    return Middle(lambda net, x: own.apply(x))


def hooked(net: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(-1e3, 1e3))
    return x


def with_hook(part: str, kind: str) -> Middle:
    net = Middle()
    owner = net.conv1.weight if part == "weight" else net.conv2
    getattr(owner, f"register_{kind}")(lambda *values: None)
    return net


class Counts(nn.Module):
    """A state outside of the buffers."""

    calls = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def rare(draw: Any) -> Middle:
    """A block that is left out at random, so rarely that calls agree by chance."""
    return Middle(lambda net, x: x * 2 if draw() < 1e-9 else x)


def checked(net: nn.Module, training: bool = True, shape: list[int] = SHAPE) -> str:
    torch.manual_seed(0)
    return check_trace(net, trace(net, shape, training), training)


GRADIENT = "autograd.Function Own changes the gradient"
RARE = "random numbers of Python or NumPy"
ZERO = nn.Parameter(torch.zeros(1))
REFUSED = [
    (of_function(straight_through), GRADIENT),
    (of_function(wide_clip), GRADIENT),
    (of_function(gradient_clip), "write it with those, as x + (f(x) - x).detach()"),
    (with_hook("conv2", "full_backward_hook"), "has a backward hook on conv2, which may change"),
    (with_hook("conv2", "backward_hook"), "has a backward hook on conv2, which may change"),
    # On a rank it would see a part of the gradient.
    (with_hook("weight", "hook"), "has a gradient hook on its parameter conv1.weight"),
    (with_hook("weight", "post_accumulate_grad_hook"), "on its parameter conv1.weight"),
    (
        Middle(lambda net, x: net.counts(x), counts=Counts()),
        "; the module itself returns something else at each call",
    ),
    (rare(random.random), RARE),
    (rare(lambda: np.random.default_rng().random()), RARE),
    # Behind a factor of zero, as many residual branches begin, all gradients are zero.
    (Middle(lambda net, x: x + net.gain * straight_through.apply(x), gain=ZERO), GRADIENT),
]  # fmt: skip


@pytest.mark.parametrize(("net", "words"), REFUSED)
def test_network_whose_graph_would_compute_something_else_is_refused(net, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        checked(net)
    assert "\n" not in str(caught.value)


def test_difference_is_named_with_its_number():
    with pytest.raises(ConfigError) as caught:
        checked(of_function(straight_through))
    text = str(caught.value)
    assert "the network cannot be traced exactly: for a random 2x3x12x14 input" in text
    assert re.search(r"the gradient of \S+ is \S+ in the traced graph but \S+ in the module", text)
    checked(of_function(straight_through), training=False)  # the forward pass is the same


def test_hook_on_a_tensor_is_an_error():
    # It clips nothing in the trial, but would in a run.
    with pytest.raises(ConfigError, match=r"has a hook on a tensor \(register_hook\)"):
        checked(Middle(hooked))
    checked(Middle(hooked), training=False)


def test_parameter_keeps_its_strides():
    # A channels-last parameter of (C, H, W, 2) is no complex one.
    def filtered(net: Any, x: Tensor) -> Tensor:
        gains = torch.view_as_complex(net.gains) * net.flat.view(-1).sum()
        return torch.fft.irfft2(torch.fft.rfft2(x) * gains, s=x.shape[-2:])

    gains = nn.Parameter(torch.randn(8, 12, 8, 2))
    net = Middle(filtered, gains=gains, flat=nn.Parameter(torch.randn(2, 3, 4, 5)))
    graph = trace(net, SHAPE, True)
    assert check_trace(net, graph, True) == ""
    tensors = dict(net.named_parameters())
    place_tensors(tensors, torch.float32, graph)  # on a rank
    assert tensors["conv1.weight"].is_contiguous(memory_format=torch.channels_last)
    assert gains.is_contiguous()
    assert net.flat.is_contiguous()


def normed(*parts: nn.Module) -> nn.Module:
    """Returns a classifier whose first convolution has a bias before a norm."""
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *parts, nn.ReLU(), *head)


class Tiny(nn.Module):
    """A network whose gradients are all tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normed(nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda: normed(nn.GroupNorm(8, 8), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)),
        lambda: normed(nn.BatchNorm2d(8), nn.Dropout2d(0.3)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.AvgPool2d(30)),  # 0
        Tiny,
    ],
)
def test_rounding_of_a_gradient_that_is_zero_is_no_difference(make):
    # A bias before a norm: the verdict followed one draw that nothing seeded.
    net, shape = make(), [4, 3, 32, 32]
    torch.seed()
    assert check_trace(net, trace(net, shape, True), True) == ""


def low_frequencies(x: Tensor) -> Tensor:
    """Writes slices of complex numbers, as Fourier operators do."""
    found = torch.fft.rfft2(x)
    kept = torch.zeros_like(found)
    kept[:, :, :4, :3] = found[:, :, :4, :3] * 2
    kept[..., -1] = found[..., 0]
    return torch.fft.irfft2(kept, s=x.shape[-2:])


def draws_by_place(net: Any, x: Tensor) -> Tensor:
    x = x + (torch.sign(x - 0.3) - x).detach()  # a gradient of its own, in operators
    x = low_frequencies(F.dropout(F.dropout2d(swish.apply(x), 0.3), 0.4))
    x = F.alpha_dropout(x, 0.4) + 0.1 * torch.randn_like(x)
    return torch.where(x > 1, x / 0, x).nan_to_num(0.0, 1.0, 0.0)


def draws_at_once(net: Any, x: Tensor) -> Tensor:
    """One that is not drawn by place, and an operator that draws twice."""
    counts = torch.poisson(x.detach().abs())
    return F.dropout(counts + net.rows(x.flatten(0, 1))[0].view_as(x), 0.3)


def attended(net: Any, x: Tensor) -> Tensor:
    """The draw of an operator that ranks do not draw alike."""
    pixels = F.alpha_dropout(x, 0.2).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(pixels, pixels, pixels, dropout_p=0.2).mT.view_as(x)


def views_and_checkpoint(net: Any, x: Tensor) -> Tensor:
    """Views that a channels-last map does not have, and a part that would draw twice."""
    y = x.contiguous().view(x.size(0), -1).view_as(x)
    y = y.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, x.size(1))
    y = y.view(x.size(0), x.size(2), x.size(3), -1).permute(0, 3, 1, 2)
    return checkpoint(net.part, y, use_reentrant=True)


@pytest.mark.parametrize(
    "net",
    [
        Middle(draws_by_place),
        Middle(draws_at_once, rows=nn.LSTM(SHAPE[3], SHAPE[3], 3, dropout=0.3)),
        Middle(attended),
        Middle(views_and_checkpoint, part=nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.4))),
        Middle(lambda net, x: net.conv2(x.float())),  # fails in float64
        *(Cells(), Scaled()),
    ],
)
def test_network_that_is_what_its_graph_is_passes(net):
    before = {name: t.clone() for name, t in net.state_dict().items() if "running" in name}
    for training in (False, True):
        assert checked(net, training) == "", training
        after = net.state_dict()
        assert all(torch.equal(t.double(), after[name].double()) for name, t in before.items())


def test_front_end_hears_of_it():
    model = ModelConfig("custom", target=f"{__name__}:straight", classes=5)
    config = RunConfig(image=SHAPE[2:], batch=2, model=model)
    error = reply_to({"trace": to_dict(config)})["error"]
    assert (error["type"], GRADIENT in error["text"]) == ("ConfigError", True)
    config.model.target = f"{__name__}:Middle"
    answers = []
    for _ in range(2):
        torch.seed()
        answers.append(reply_to({"trace": to_dict(config)})["graph"])
    assert answers[0] == answers[1]
    assert Graph.from_dict(answers[0]).unchecked == ""


def straight() -> nn.Module:
    return of_function(straight_through)
