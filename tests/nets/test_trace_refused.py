"""A network that cannot become a graph is answered in one line that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError
from hires.nets.trace import trace, trace_config
from tests.helpers.tiny_nets import Forward, Net, traced


def reason(forward: Any, **parts: Any) -> str:
    """What the user is told."""
    with pytest.raises(ConfigError) as caught:
        traced(forward, **parts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_by_strides(n: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.as_strided((2, 3), (1, 2)).add_(1)
    return y


def write_to_expanded(n: Any, x: Tensor) -> Tensor:
    y = x.mean((2, 3), keepdim=True).expand(2, 4, 9, 1)
    y.add_(1)
    return y


@pytest.mark.parametrize("forward", [write_by_strides, write_to_expanded])
def test_write_through_a_view_of_strides_is_refused(forward):
    assert "writes in place into memory that it also reads otherwise (aten." in reason(forward)
    assert "use the out-of-place operation there" in reason(forward)


def test_refused_write_names_its_module():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), Net(write_by_strides))
    with pytest.raises(ConfigError, match=r"\(aten\.add_\.Tensor at 1, by way of as_strided\)"):
        trace(net, [2, 4, 9, 8], True)


def test_strides_of_a_view_are_refused():
    text = reason(lambda n, x: (x * 2)[:, :2].as_strided((2, 3), (1, 2)))
    assert "reads memory by strides (aten.as_strided.default at the top level)" in text


def test_out_argument_is_refused():
    assert "aten.sum.IntList_out; use the variant without out=" in reason(
        lambda n, x: torch.sum(x, (1, 2), out=x.new_empty(0))  # which it makes larger
    )


class Counts(nn.Module):
    """Writes to a buffer of its own in the forward pass."""

    def __init__(self, write: Forward) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return x * self.weight


def assign(n: Any, x: Tensor) -> None:
    n.seen = n.seen + x.mean()


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (assign, "counts.seen what it computes from the images"),
        (lambda n, x: setattr(n, "seen", x.mean((0, 2, 3))[:1]), "counts.seen what it computes"),
        (lambda n, x: setattr(n, "seen", n.weight * 2), "counts.seen with gradients"),
        (lambda n, x: n.seen.add_(torch.rand(1)), "counts.seen random numbers"),
        (lambda n, x: n.weight.detach().mul_(0.9), "counts.weight; hires keeps the running"),
    ],
)
def test_write_to_a_buffer_that_another_layout_would_not_make_is_refused(write, what):
    # It was left out in silence: the buffer of a rank stayed as it was.
    text = reason(lambda n, x: n.counts(x), counts=Counts(write))
    assert f"the network's forward pass writes to {what}" in text


def test_line_of_the_network_that_fails_is_named():
    text = reason(lambda n, x: torch.cat([x, x[:, :, :2]], 1))
    assert f"at {__file__}:" in text
    assert "(text = reason(lambda n, x: torch.cat" in text


def test_table_that_depends_on_shapes_may_be_kept_in_a_buffer():
    # Networks keep tables of positions so, and make them again if the image has another size.
    def table(n: Any, x: Tensor) -> None:
        n.seen = torch.arange(x.shape[2]).view(1, -1) * torch.tensor(2.0)

    def forward(n: Any, x: Tensor) -> Tensor:
        return n.counts(x) + n.counts.seen.sum()

    graph = traced(forward, counts=Counts(table))
    assert "counts.seen" not in graph.params


def test_counter_of_a_norm_is_the_one_buffer_that_may_be_written():
    graph = traced(lambda n, x: n.bn(x), bn=nn.BatchNorm2d(4))
    assert [node.op for node in graph.nodes] == ["batch_norm.default"]


def test_constants_that_fill_the_plan_are_refused():
    text = reason(lambda n, x: x + n.table[:9, :8], table=torch.ones(1500, 1500))
    assert text == (
        "the network holds 8 MiB of tensors that are neither parameters nor buffers, as table; "
        "register them with register_buffer"
    )


def test_tensor_without_numbers_is_refused():
    # It was made while the network was traced, and has a shape only.
    class Caches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            global left
            left = left if left is not None else x.new_ones(1)
            return x * left

    global left
    left = torch.ones(1, device="meta")
    assert "meta" in reason(lambda n, x: n.net(x), net=Caches())


left: Tensor | None = None


def test_tensor_made_beside_the_images_is_fine():
    graph = traced(lambda n, x: x + torch.arange(8, device=x.device))
    assert [node.kind for node in graph.nodes] == ["arange", "add"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda n, x: (x + 1, x + 2), "it returns a tuple"),
        (lambda n, x: [x + 1], "it returns a list"),
        # One tensor in a dict was taken, but what compares with it calls the module itself.
        (lambda n, x: {"out": x + 1}, "it returns a dict"),
        (lambda n, x: x, "it returns the image itself"),
        (lambda n, x: 5, "it returns something else"),
        (lambda n, x: n.weight, "it returns something else"),
        (lambda n, x: n.weight + 1, "output does not depend on the image"),
    ],
)
def test_only_one_tensor_computed_from_the_image_can_be_returned(forward, expected):
    assert expected in reason(forward, weight=nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda n, x: n.missing(x), "AttributeError: 'Net' object has no attribute 'missing'"),
        (lambda n, x: {}["key"], "KeyError: 'key'"),
        (lambda n, x: x @ x.new_empty(3, 3), "RuntimeError: "),
        (lambda n, x: x if x.sum() > 0 else -x, "its control flow depends on the values of tensor"),
        (lambda x: x, "TypeError: "),
    ],
)
def test_forward_pass_that_fails_says_why(forward, expected):
    text = reason(forward)
    assert text.startswith("the network's forward pass on an input of [2, 4, 9, 8] failed or ")
    assert expected in text


def test_choice_by_value_names_its_remedy_and_line():
    def forward(n: Any, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x

    text = reason(forward)
    assert "choose with torch.where(condition, a, b) at " in text
    assert "(return x if x.mean() > 0 else -x)" in text
    assert "Guard" not in text


def test_view_of_a_channels_last_map_names_reshape():
    text = reason(lambda n, x: x.to(memory_format=torch.channels_last).view(x.size(0), -1))
    assert "use reshape" in text


def test_image_too_small_for_the_network_says_so():
    with pytest.raises(ConfigError, match=r"input of \[1, 3, 2, 2\] failed .*size.*too small"):
        trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(4)), [1, 3, 2, 2], False)


def test_operation_that_is_not_torchs_own_is_named():
    def forward(n: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    assert "which is no ATen operation; write it with torch's own" in reason(forward)


def test_lower_precision_of_its_own_is_refused():
    def forward(n: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return n.conv(x)

    assert "use precision=bf16" in reason(forward, conv=nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize(
    "forward",
    [
        lambda n, x: x * x.sum().item(),
        lambda n, x: x[:, : int(x.sum())],
        lambda n, x: x[x > 0],
        lambda n, x: x.nonzero().sum() + x,
    ],
)
def test_size_or_number_that_depends_on_values_is_refused(forward):
    text = reason(forward)
    assert "the values of " in text


def test_image_that_is_too_small_is_answered_with_one_that_works():
    # Batch norm cannot train on the one number per channel that is left of 32x32 pixels.
    model = {"name": "resnet", "depth": 18, "classes": 4}
    with pytest.raises(ConfigError, match=r"more than 1 value per channel.*; image=64 works"):
        trace_config(from_dict({"image": 32, "batch": 1, "model": model}))
