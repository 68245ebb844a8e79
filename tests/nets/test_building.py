"""Networks begin with the same weights everywhere, and users' own ones are called on images."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import NETS, build_model, materialise
from hires.nets.custom import chosen, custom, on_images
from hires.nets.trace import trace

SMALL = ModelConfig(name="preact_resnet", depth=11, classes=4)


def state(names: list[str] | None = None, seed: int = 0, **keys: Any) -> dict[str, Tensor]:
    """The named tensors of a freshly made network, or all of them."""
    model = build_model(dataclasses.replace(SMALL, **keys), seed)
    materialise(model, list(model.state_dict()) if names is None else names, seed)
    return {name: t for name, t in model.state_dict().items() if not t.is_meta}


def test_first_weights_follow_from_seed_and_name_alone():
    torch.manual_seed(3)
    whole, after = state(), torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after)  # the seed of torch is neither read nor changed
    for name in [*whole][::7]:
        part = state([name])
        assert name in part
        assert len(part) < 6, "only the layer of that name is filled"
        assert all(torch.equal(tensor, whole[key]) for key, tensor in part.items())
    model = build_model(SMALL, 0)
    for name in reversed(whole):
        materialise(model, [name], 0)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())
    other, alike, many = state(seed=2), state(depth=20), state(classes=9)
    weights = [name for name in whole if "conv" in name]
    assert not any(torch.equal(whole[name], other[name]) for name in weights)
    assert not torch.equal(alike["group1.0.conv2.weight"], alike["group1.1.conv2.weight"])
    differing = [name for name in whole if not torch.equal(whole[name], many[name])]
    assert differing == ["fc.weight", "fc.bias"]  # the number of classes changes nothing else


class Scale(nn.Module):
    """A layer of a kind that hires does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((3, 1, 1), 1e-6))


class Resetting(Scale):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.gamma)


def test_layers_without_listed_first_values_keep_or_draw_their_own(monkeypatch):
    def gamma(layer: type[Scale]) -> Tensor:
        make = lambda: nn.Sequential(nn.Conv2d(3, 3, 1), layer())  # noqa: E731
        monkeypatch.setitem(NETS._items, "scaled", make)
        return state(name="scaled")["1.gamma"]

    assert torch.equal(gamma(Scale), torch.full((3, 1, 1), 1e-6))
    assert torch.equal(gamma(Resetting), gamma(Resetting))
    assert gamma(Resetting).std() > 0


def test_arguments_that_are_no_keys_come_from_model_args(monkeypatch):
    def make(classes: int, channels: int = 3, *, kernel: int, bias: bool = True) -> nn.Module:
        return nn.Conv2d(channels, classes, kernel, bias=bias)

    monkeypatch.setitem(NETS._items, "plain", make)
    shapes = {key: [*one.shape] for key, one in state(name="plain", args={"kernel": 5}).items()}
    assert shapes == {"weight": [4, 3, 5, 5], "bias": [4]}
    for args, cause in (
        ({}, "missing a required argument: 'kernel'"),
        ({"kernel": 5, "width": 1}, "unexpected keyword argument 'width'"),
        ({"kernel": 5, "classes": 1}, "multiple values for keyword argument 'classes'"),
    ):
        with pytest.raises(ConfigError, match=cause):
            state(name="plain", args=args)


def drawn_elsewhere() -> nn.Module:
    """A network whose first weights come from Python, NumPy and torch."""
    net = nn.Linear(3, 1)
    net.weight.data[0] = torch.tensor([random.random(), np.random.rand(), torch.rand(1)])
    return net


def test_custom_network_draws_the_same_in_every_process():
    # Each rank builds it: two tiles had other weights.
    config = ModelConfig(name="custom", target=f"{__name__}:drawn_elsewhere")
    before, host = random.getstate(), torch.random.get_rng_state()
    one, again, other = (build_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert random.getstate() == before
    assert torch.equal(torch.random.get_rng_state(), host)
    assert torch.equal(one["weight"], again["weight"])
    assert not torch.isclose(one["weight"], other["weight"]).any()
    net = build_model(config, 1)
    materialise(net, list(one), 7)  # which is filled already
    assert torch.equal(net.state_dict()["weight"], one["weight"])


_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes the user's file into the current folder; returns its module name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def write(text: str) -> str:
        made.append(f"my_net_{next(_numbers)}")
        (tmp_path / f"{made[-1]}.py").write_text("from torch import nn\n" + text)
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


NET = "def net(width, depth=2):\n    return nn.Conv2d(3, width, 1)\n"
FAILS = "def net(width):\n    return nn.Conv2d(3, width + [], 1)\n"
META = "def net():\n    return nn.Sequential(nn.Conv2d(3, 4, 1, device='meta'))\n"
SCRIPT = "import torch\n\n\ndef net():\n    return torch.jit.script(nn.Conv2d(3, 8, 3))\n"
OTHERS = "def small():\n    pass\nclass Large(nn.Module):\n    pass\nsize = 3\n"
REFUSED = {  # the user's file (None: the name of another module), function, args and the answer
    "no module": (None, "no_such_package.net:build", {}, "No module named 'no_such_package'"),
    # Only failed imports were caught; anything else in the user's file gave a traceback.
    "syntax": ("def net(:\n", "net", {}, "SyntaxError: "),
    "exits": ("import sys\nsys.exit('usage: DATA')\n", "net", {}, "SystemExit: usage: DATA"),
    "near": (OTHERS, "smal", {}, "has no function 'smal'; did you mean small?"),
    "value": (OTHERS, "size", {}, "no function 'size'"),
    "args": (NET, "net", {"widht": 3}, "which takes (width, depth=2): missing a required argument"),
    # A TypeError of the function's own was called a wrong argument.
    "fails": (FAILS, "net", {"width": 3}, "failed with model.args={'width': 3}: TypeError: unsup"),
    "class": ("def net():\n    return nn.Conv2d\n", "net", {}, "returned type, not a torch.nn.Mo"),
    "meta": (META, "net", {}, "leaves 0.weight on the meta device; make it on the CPU"),
    "script": (SCRIPT, "net", {}, "returned a ScriptModule; return the plain nn.Module"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_target_that_makes_no_network_is_refused_in_one_line(module, case):
    text, function, args, answer = REFUSED[case]
    target = function if text is None else f"{module(text)}:{function}"
    with pytest.raises(ConfigError) as caught:
        custom(target, args)
    message = str(caught.value)
    assert "\n" not in message
    assert target in message
    assert answer in message


@dataclasses.dataclass
class Answer:
    """What some networks return."""

    logits: Tensor
    aux: list[Tensor]
    loss: Tensor | None = None


Pair = namedtuple("Pair", "first second")
A, B, C = torch.zeros(1, 2), torch.zeros(3), torch.zeros(4, 5)
SHAPE = [2, 3, 6, 4]


def test_output_is_found_by_its_path_or_as_the_only_tensor():
    for returned, paths in (
        ({"out": A, "aux": B}, {"out": A, "aux": B}),
        ((A, [B, C]), {"0": A, "1.0": B, "1.1": C}),
        (OrderedDict(out=A, more={"x": B, 3: C}), {"more.x": B, "more.3": C}),
        (Answer(A, [B, C]), {"logits": A, "aux.1": C}),
        (Pair(A, B), {"first": A, "second": B}),
        (SimpleNamespace(sample=A, other=B, name="net"), {"sample": A}),
    ):
        assert all(chosen(returned, path) is tensor for path, tensor in paths.items())
        with pytest.raises(ConfigError, match=r"choose one, as model\.output="):
            chosen(returned, None)
    for returned in (A, [A], {"sample": A}, Answer(A, []), (A, None, 3)):
        assert chosen(returned, None) is A
    with pytest.raises(ConfigError, match=r"2 tensors: out \[1, 2\], aux\.0 \[3\]; .*, not logits"):
        chosen({"out": A, "aux": [B]}, "logits")
    for returned in ({}, "text", None):
        with pytest.raises(ConfigError, match="without tensors"):
            chosen(returned, None)
    with pytest.raises(ConfigError, match=r"model.output=out: .* one tensor; leave it out"):
        chosen(A, "out")
    with pytest.raises(ConfigError, match=r"model\.inputs=\['image'\] has no images"):
        ModelConfig(inputs=["image"])


class Takes(nn.Module):
    """Takes images in one way, and returns several tensors."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.unused = nn.Conv2d(3, 4, 1)
        self.take = take

    def forward(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Returns its features and, by the way, others."""
        x = self.take(*args, **named)
        return {"features": [self.conv(x)], "unused": self.unused(x)}


@pytest.mark.parametrize(
    ("inputs", "take"),
    [
        (None, lambda x: x),
        ("pixel_values", lambda *, pixel_values: pixel_values),
        ([["images"]], lambda xs: xs[0]),
        ([{"image": "images", "scale": 3}], lambda batch: batch["image"] * batch["scale"]),
        ({"sample": "images", "step": 10, "text": None}, lambda sample, step, text: sample + step),
        (["image_list"], torch.stack),
        ("image_list", torch.stack),
    ],
)
def test_images_are_given_as_the_network_takes_them(inputs, take):
    net = on_images(Takes(take), inputs, "features.0")
    assert type(net).__name__ == "Takes"
    assert net(torch.zeros(SHAPE)).shape == (2, 4, 6, 4)
    graph = trace(net, SHAPE, training=True)
    assert set(graph.params) == {"conv.weight", "conv.bias"}  # what else it computes is left out
    again = on_images(net, inputs, "unused")  # a module that its file keeps and returns again
    assert set(trace(again, SHAPE, True).params) == {"unused.weight", "unused.bias"}
