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

SHAPE = [2, 3, 20, 24]


class StraightThrough(torch.autograd.Function):
    """A sign with the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns the signs."""
        return torch.sign(x - 0.3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the gradient as it comes."""
        return grad


class WideClip(StraightThrough):
    """A clip with the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns the clipped numbers."""
        return x.clamp(-9, 9)


class GradClip(torch.autograd.Function):
    """A clip of the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns the numbers as they are."""
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the clipped gradient."""
        return grad.clamp(-9, 9)


class Swish(torch.autograd.Function):
    """x sigmoid(x), whose gradient needs x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns x sigmoid(x)."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the gradient that torch has, too."""
        [x] = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


def attended(net: Any, x: Tensor) -> Tensor:
    pixels = F.alpha_dropout(x, 0.2).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(pixels, pixels, pixels, dropout_p=0.2).mT.view_as(x)


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
        """(n, 3, H, W) -> logits (n, 5)."""
        x = self.middle(self, F.relu(self.norm(self.conv1(x))))
        return self.head(self.conv2(x).mean((2, 3)))


def straight_through(net: Any, x: Tensor) -> Tensor:
    return StraightThrough.apply(x)


def straight_through_in_operators(net: Any, x: Tensor) -> Tensor:
    return x + (torch.sign(x - 0.3) - x).detach()


def hooked(net: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(-1e3, 1e3))
    return x


def checked(net: nn.Module, training: bool = True, shape: list[int] = SHAPE) -> str:
    torch.manual_seed(0)
    return check_trace(net, trace(net, shape, training), training)


def refusal(net: nn.Module, training: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(net, training)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("middle", "cause"),
    [
        (straight_through, "autograd.Function StraightThrough changes the gradient"),
        # Nothing is clipped in the first trial.
        (lambda net, x: WideClip.apply(x), "autograd.Function WideClip changes the gradient"),
        (lambda net, x: GradClip.apply(x), "autograd.Function GradClip changes the gradient"),
    ],
)
def test_gradient_that_a_graph_would_lose_is_an_error(middle, cause):
    # The network trained with another gradient, and nothing was said.
    text = refusal(Middle(middle))
    assert "the network cannot be traced exactly: for a random 2x3x20x24 input" in text
    assert re.search(r"the gradient of \S+ is \S+ in the traced graph but \S+ in the module", text)
    assert cause in text
    assert "write it with those, as x + (f(x) - x).detach()" in text
    checked(Middle(middle), training=False)  # the forward pass is the same


def test_function_with_the_gradient_of_its_operators_passes():
    assert checked(Middle(lambda net, x: Swish.apply(x))) == ""


def test_hook_on_a_tensor_is_an_error():
    # It clips nothing in the trial, but would in a run.
    text = refusal(Middle(hooked))
    assert "has a hook on a tensor (register_hook), which may change the gradient" in text
    checked(Middle(hooked), training=False)


@pytest.mark.parametrize(
    "register",
    ["register_full_backward_hook", "register_backward_hook", "register_full_backward_pre_hook"],
)
def test_backward_hook_of_a_module_is_an_error(register):
    net = Middle()
    getattr(net.conv2, register)(lambda module, *grads: None)
    assert "has a backward hook on conv2, which may change the gradient" in refusal(net)


def test_parameter_keeps_its_strides():
    # A channels-last parameter of (C, H, W, 2) is no complex one.
    def filtered(net: Any, x: Tensor) -> Tensor:
        gains = torch.view_as_complex(net.gains) * net.flat.view(-1).sum()
        return torch.fft.irfft2(torch.fft.rfft2(x) * gains, s=x.shape[-2:])

    gains = nn.Parameter(torch.randn(8, 20, 13, 2))
    net = Middle(filtered, gains=gains, flat=nn.Parameter(torch.randn(2, 3, 4, 5)))
    graph = trace(net, SHAPE, True)
    assert check_trace(net, graph, True) == ""
    tensors = dict(net.named_parameters())
    place_tensors(tensors, torch.float32, graph)  # on a rank
    assert tensors["conv1.weight"].is_contiguous(memory_format=torch.channels_last)
    assert gains.is_contiguous()
    assert net.flat.is_contiguous()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_a_parameter_is_an_error(hook):
    # On a rank it would see a part of the gradient.
    net = Middle()
    getattr(net.conv1.weight, hook)(lambda gradient: None)
    assert "has a gradient hook on its parameter conv1.weight" in refusal(net)
    checked(net, training=False)


class Counts(nn.Module):
    """A state outside of the buffers."""

    calls = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns more at each call."""
        self.calls += 1
        return x * self.calls


def test_network_that_is_another_at_each_call_is_an_error():
    text = refusal(Middle(lambda net, x: net.counts(x), counts=Counts()))
    assert "an output value is" in text
    assert "; the module itself returns something else at each call" in text


def normed(*parts: nn.Module, width: int = 8) -> nn.Module:
    """Returns a classifier whose first convolution has a bias before a norm."""
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    return nn.Sequential(*parts, nn.ReLU(), *head)


def conv(width: int = 8) -> nn.Module:
    return nn.Conv2d(3, width, 3, padding=1)


class Tiny(nn.Module):
    """A network whose gradients are all tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normed(conv(), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> (n, 10)."""
        return self.net(x) * 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda: normed(conv(), nn.BatchNorm2d(8)),
        lambda: normed(conv(), nn.GroupNorm(8, 8), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)),
        lambda: normed(nn.utils.parametrizations.weight_norm(conv()), nn.BatchNorm2d(8)),
        lambda: normed(conv(), nn.BatchNorm2d(8), nn.Dropout2d(0.3)),
        lambda: nn.Sequential(conv(), nn.InstanceNorm2d(8), nn.AvgPool2d(32)),  # all are 0
        Tiny,
    ],
)
def test_rounding_of_a_gradient_that_is_zero_is_no_difference(make):
    # A bias before a norm: the verdict followed one draw that nothing seeded.
    for shape in ([2, 3, 64, 64], [8, 3, 32, 32]):
        net = make()
        torch.seed()
        assert check_trace(net, trace(net, shape, True), True) == "", shape


@pytest.mark.parametrize(
    "draws",
    [
        lambda: random.random,
        lambda: np.random.rand,
        # Made anew in each call, from the randomness of the system.
        lambda: lambda: np.random.default_rng().random(),
        lambda: random.SystemRandom().random,
    ],
)
def test_draw_that_rarely_changes_anything_is_refused_every_time(draws):
    # A block that is left out at random was accepted if the calls agreed by chance.
    draw = draws()

    def middle(net: Any, x: Tensor) -> Tensor:
        return x * 2 if draw() < 1e-9 else x

    for _ in range(3):
        assert "random numbers of Python or NumPy" in refusal(Middle(middle))


def low_frequencies(net: nn.Module, x: Tensor) -> Tensor:
    """Writes slices of complex numbers, as Fourier operators do."""
    found = torch.fft.rfft2(x)
    kept = torch.zeros_like(found)
    kept[:, :, :4, :3] = found[:, :, :4, :3] * 2
    kept[..., -1] = found[..., 0]
    return torch.fft.irfft2(kept, s=x.shape[-2:])


def part() -> nn.Module:
    """Returns a part with random numbers."""
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.4), nn.Tanh())


class Normal(nn.Module):
    """A network with its own ideas of layout."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x by way of views that a channels-last map does not have."""
        y = x.contiguous().view(x.size(0), -1).view_as(x)
        y = y.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, x.size(1))
        return y.view(x.size(0), x.size(2), x.size(3), -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "net",
    [
        Middle(straight_through_in_operators),
        Middle(lambda net, x: F.dropout(F.dropout2d(x, 0.3), 0.4)),
        Middle(lambda net, x: F.alpha_dropout(x, 0.4) + 0.1 * torch.randn_like(x)),
        Middle(  # an operator that draws twice, and one that is not drawn by place
            lambda net, x: F.dropout(
                torch.poisson(x.detach().abs()) + net.rows(x.flatten(0, 1))[0].view_as(x), 0.3
            ),
            rows=nn.LSTM(SHAPE[3], SHAPE[3], 3, dropout=0.3),
        ),
        Middle(low_frequencies),
        Middle(attended),  # the draw of an operator that ranks do not draw alike
        Middle(lambda net, x: net.own(x), own=Normal()),
        # The second run of a checkpointed part would draw other numbers.
        Middle(lambda net, x: checkpoint(net.part, x, use_reentrant=True), part=part()),
        Middle(lambda net, x: net.conv2(x.float())),  # fails in float64
        Middle(lambda net, x: torch.where(x > 1, x / 0, x).nan_to_num(0.0, 1.0, 0.0)),
        *(Cells(), Scaled()),
    ],
)
def test_network_that_is_what_its_graph_is_passes(net):
    before = {name: t.clone() for name, t in net.state_dict().items() if "running" in name}
    for training in (False, True):
        assert checked(net, training) == "", training
        after = net.state_dict()
        assert all(torch.equal(t.double(), after[name].double()) for name, t in before.items())


def test_first_weights_of_zero_hide_nothing():
    # Behind a factor of zero, as many residual branches begin, all gradients were zero: equal.
    net = Middle(lambda net, x: x + net.gain * StraightThrough.apply(x))
    net.gain = nn.Parameter(torch.zeros(1))
    assert "StraightThrough" in refusal(net)


def test_front_end_hears_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ModelConfig("custom", target=f"{__name__}:straight", classes=5)
    config = RunConfig(image=[20, 24], batch=2, model=model)
    error = reply_to({"trace": to_dict(config)})["error"]
    assert error["type"] == "ConfigError"
    assert "StraightThrough" in error["text"]
    config.model.target = f"{__name__}:Middle"
    answers = []
    for _ in range(2):
        torch.seed()
        answers.append(reply_to({"trace": to_dict(config)})["graph"])
    assert answers[0] == answers[1]
    assert Graph.from_dict(answers[0]).unchecked == ""


def straight() -> nn.Module:
    """Returns a network that hires cannot train."""
    return Middle(straight_through)
