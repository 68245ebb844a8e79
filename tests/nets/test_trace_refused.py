"""A network that cannot become a graph is refused in one line that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.trace import trace
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


def autocast(n: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return n.conv(x)


MADE_WHILE_TRACED = torch.ones(1, device="meta")
"""A tensor that was made while another network was traced, and has a shape only."""
SHARED = "writes in place into memory that it also reads otherwise (aten."
LAST = torch.channels_last
CASES: dict[str, tuple[Any, str]] = {
    "write by strides": (write_by_strides, SHARED),
    "strides": (lambda n, x: (x * 2)[:, :2].as_strided((2, 3), (1, 2)),
                "reads memory by strides (aten.as_strided.default at the top level)"),
    "out": (lambda n, x: torch.sum(x, (1, 2), out=x.new_empty(0)),  # which it makes larger
            "aten.sum.IntList_out; use the variant without out="),
    "a tuple": (lambda n, x: (x + 1, x + 2), "it returns a tuple"),
    # One tensor in a dict was taken, but what compares with it calls the module itself.
    "a dict": (lambda n, x: {"out": x + 1}, "it returns a dict"),
    "the image": (lambda n, x: x, "it returns the image itself"),
    "a parameter": (lambda n, x: n.weight, "it returns something else"),
    "no image": (lambda n, x: n.weight + 1, "output does not depend on the image"),
    "attribute": (lambda n, x: n.missing(x), "AttributeError: 'Net' object has no attribute"),
    "choice": (lambda n, x: x if x.mean() > 0 else -x, "with torch.where(condition, a, b) at "),
    "file": (lambda n, x: torch.cat([x, x[:, :, :2]], 1), f"at {__file__}:"),
    "view": (lambda n, x: x.to(memory_format=LAST).view(x.size(0), -1), "use reshape"),
    "one value": (lambda n, x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
                  "a larger batch, fewer microbatches or a larger image give it more"),
    "other operators": (lambda n, x: torch.cond(x.sum() > 0, torch.neg, torch.exp, (x,)),
                        "which is no ATen operation; write it with torch's own, or give an"),
    "autocast": (autocast, "use precision=bf16"),
    "mask": (lambda n, x: x[x > 0], "the values of "),
    "constant": (lambda n, x: x + n.table[:9, :8],
                 "the network holds 8 MiB of tensors that are neither parameters nor buffers, as "
                 "table; register them with register_buffer"),
    "no numbers": (lambda n, x: x * MADE_WHILE_TRACED, "meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_forward_pass_is_refused_with_the_reason(case):
    forward, expected = CASES[case]
    parts: dict[str, Any] = {"weight": nn.Parameter(torch.ones(3)), "conv": nn.Conv2d(4, 4, 1)}
    parts |= {"table": torch.ones(1500, 1500)} if case == "constant" else {}
    assert expected in reason(forward, **parts)


class Counts(nn.Module):
    """Writes to a buffer of its own in the forward pass."""

    def __init__(self, write: Forward) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        """(n, C, H, W) -> the same shape."""
        self.write(self, x)
        return x * self.weight


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda n, x: setattr(n, "seen", n.seen + x.mean()), "counts.seen what it computes from"),
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


@pytest.mark.parametrize("zeroed", ["running_mean", "running_var"])
@pytest.mark.parametrize("first", [True, False])
def test_write_to_statistics_that_a_norm_updates_is_refused(zeroed, first):
    # A KeyError of the ranks, or, after the norm, one of the two updates was lost.
    def forward(n: Any, x: Tensor) -> Tensor:
        if first:
            getattr(n.norm, zeroed).zero_()
        y = n.norm(x)
        if not first:
            getattr(n.norm, zeroed).zero_()
        return y

    text = reason(forward, norm=nn.BatchNorm2d(4))
    assert f"writes to norm.{zeroed}, which a norm updates, too" in text


def test_tables_of_shapes_and_counters_of_norms_may_be_kept_in_buffers():
    # Networks keep tables of positions so, and make them again if the image has another size.
    def table(n: Any, x: Tensor) -> None:
        n.seen = torch.arange(x.shape[2]).view(1, -1) * torch.tensor(2.0)

    graph = traced(lambda n, x: n.counts(x) + n.counts.seen.sum(), counts=Counts(table))
    assert "counts.seen" not in graph.params


def test_module_and_image_are_named():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), Net(write_by_strides))
    with pytest.raises(ConfigError, match=r"\(aten\.add_\.Tensor at 1, by way of as_strided\)"):
        trace(net, [2, 4, 9, 8], True)
    with pytest.raises(ConfigError, match=r"input of \[1, 3, 2, 2\] failed .*size.*too small"):
        trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(4)), [1, 3, 2, 2], False)
    text = reason(lambda n, x: x + torch.zeros_like(x).random_(3, 5))
    assert "random_(from, to); use torch.randint" in text
