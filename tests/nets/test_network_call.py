"""A network takes images and returns its output in its own way; hires calls it on images."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name
from hires.nets.network_call import chosen, on_images
from hires.nets.trace import trace
from tests.helpers.small_plans import config_of

SHAPE = [2, 3, 6, 4]


@dataclasses.dataclass
class Answer:
    """What some networks return."""

    logits: Tensor
    aux: list[Tensor]
    loss: Tensor | None = None


Pair = namedtuple("Pair", "first second")
A, B, C = torch.zeros(1, 2), torch.zeros(3), torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("returned", "paths"),
    [
        ({"out": A, "aux": B}, {"out": A, "aux": B}),
        ((A, [B, C]), {"0": A, "1.0": B, "1.1": C}),
        (OrderedDict(out=A, more={"x": B, 3: C}), {"more.x": B, "more.3": C}),
        (Answer(A, [B, C]), {"logits": A, "aux.1": C}),
        (Pair(A, B), {"first": A, "second": B}),
        (SimpleNamespace(sample=A, other=B, name="net"), {"sample": A}),
    ],
)
def test_output_is_found_by_its_path(returned, paths):
    assert all(chosen(returned, path) is tensor for path, tensor in paths.items())
    with pytest.raises(ConfigError, match=r"choose one, as model\.output="):
        chosen(returned, None)


@pytest.mark.parametrize("returned", [A, [A], {"sample": A}, Answer(A, []), (A, None, 3)])
def test_only_tensor_needs_no_path(returned):
    assert chosen(returned, None) is A


def test_unknown_path_is_answered_with_those_there_are():
    with pytest.raises(ConfigError) as caught:
        chosen({"out": A, "aux": [B]}, "logits")
    assert str(caught.value) == (
        "the network returns a dict of 2 tensors: out [1, 2], aux.0 [3]; choose one, as "
        "model.output=out, not logits"
    )
    for returned in ({}, "text", None):
        with pytest.raises(ConfigError, match="without tensors"):
            chosen(returned, None)
    with pytest.raises(ConfigError, match=r"model.output=out: .* one tensor; leave it out"):
        chosen(A, "out")


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


def test_forward_that_was_assigned_is_the_one_that_is_called():
    net = nn.Conv2d(3, 4, 1)
    net.forward = lambda x: (x * 2, x)
    assert torch.equal(on_images(net, None, "0")(torch.ones(SHAPE)), torch.full(SHAPE, 2.0))


def test_inputs_without_images_are_refused():
    with pytest.raises(ConfigError, match=r"model\.inputs=\['image'\] has no images"):
        ModelConfig(inputs=["image"])


def test_runs_of_networks_that_take_images_keep_their_names():
    config = config_of()
    before = run_name(config)
    config.model.output = "out"
    assert run_name(config) != before
