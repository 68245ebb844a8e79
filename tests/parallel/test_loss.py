"""Is a loss over tiles, shards, stages and replicas that of the whole output, as torch has it?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.config.run_config import from_dict
from hires.core.config.training_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import LOSSES, loss_named
from hires.parallel.loss import plain_loss, sample_losses
from tests.helpers.layouts import config_of, plan_of, verified

UNET = {"model": {"name": "unet", "levels": 2, "width": 4, "classes": 4}, "image": [16, 12]}
WEIGHTED = {
    "name": "cross_entropy", "weights": [0.5, 2.0, 1.0, 0.0], "label_smoothing": 0.2,
    "ignore_index": 3
}  # fmt: skip


def keys(**values: Any) -> LossConfig:
    return LossConfig(**values)


def example(channels: int = 4) -> tuple[Tensor, Tensor]:
    """Returns scores (3, C, 6, 5) and a label for each pixel."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(3, channels, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(max(2, channels), (3, 6, 5), generator=generator)
    return output.requires_grad_(), labels


def plain_dice(output: Tensor, labels: Tensor, smooth: float, ignored: int) -> Tensor:
    """Dice pixel class by class, over the pixels that count."""
    scores = output.softmax(1).movedim(1, -1)[labels != ignored]
    labels, losses = labels[labels != ignored], []
    for index in range(output.shape[1]):
        mine, true = scores[:, index], (labels == index).to(scores)
        losses.append((2 * (mine * true).sum() + smooth) / (mine.sum() + true.sum() + smooth))
    return 1 - torch.stack(losses).mean()


def plain_bce(output: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Binary cross-entropy of the pixels that count, one class after the other."""
    scores = output.movedim(1, -1)[labels != ignored]
    hot = F.one_hot(labels[labels != ignored], output.shape[1]).to(scores)
    return F.binary_cross_entropy_with_logits(scores, hot)


REFERENCES: list[tuple[LossConfig, Any]] = [
    (keys(**WEIGHTED), lambda o, t: F.cross_entropy(
        o, t, torch.tensor(WEIGHTED["weights"]).to(o), ignore_index=3, label_smoothing=0.2)),
    (keys(name="cross_entropy"), F.cross_entropy),
    (keys(name="bce", ignore_index=2), lambda o, t: plain_bce(o, t, 2)),
    (keys(name="dice", smooth=0.3, ignore_index=1), lambda o, t: plain_dice(o, t, 0.3, 1))
]  # fmt: skip


@pytest.mark.parametrize(("loss", "reference"), REFERENCES)
def test_sums_of_parts_make_the_loss_and_gradient_of_all_pixels(loss: LossConfig, reference: Any):
    output, labels = example()
    wanted = reference(output, labels)
    [gradient] = torch.autograd.grad(wanted, output)
    parts = [(output[..., :2], labels[..., :2]), (output[..., 2:], labels[..., 2:])]
    sums = [loss_named(loss).sums(*part) for part in parts]
    assert len(sums[0]) == LOSSES[loss.name].num_sums(4)
    total = sums[0].detach() + sums[1].detach()
    found = torch.zeros_like(output)
    for own in sums:
        value = loss_named(loss).value(own + (total - own.detach()))
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
        [part] = torch.autograd.grad(value, output)
        found += part
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(plain_loss(loss, output, labels), wanted, rtol=1e-12, atol=0)
    every = torch.tensor([1, 0, 2])  # the label of an image is that of its pixels
    pixels = every.view(-1, 1, 1).expand(3, 6, 5)
    assert torch.equal(plain_loss(loss, output, every), plain_loss(loss, output, pixels))


@pytest.mark.parametrize(
    "values",
    [
        {"name": "cross_entropy", "ignore_index": 3},
        {"name": "cross_entropy", "weights": [1.0, 1.0, 1.0, 0.0], "label_smoothing": 0.2},
        {"name": "bce", "ignore_index": 3},
        {"name": "dice", "ignore_index": 3, "smooth": 0.0},
    ],
)
def test_loss_of_no_label_is_zero_and_so_is_its_gradient(values: dict[str, Any]):
    output, labels = example()
    nothing = torch.full_like(labels, 3)
    loss = plain_loss(keys(**values), output, nothing)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, output)[0].any()
    assert not sample_losses(keys(**values), output, nothing, 3).any()


def test_samples_are_evaluated_one_by_one_without_weights():
    output, labels = example()
    pairs = zip(output.split(1), labels.split(1), strict=True)
    plain = [F.cross_entropy(*pair, ignore_index=3, label_smoothing=0.2) for pair in pairs]
    torch.testing.assert_close(
        sample_losses(keys(**WEIGHTED), output, labels, 3), torch.stack(plain)
    )


def test_one_score_is_that_of_the_second_class():
    output, labels = example(1)
    wanted = F.binary_cross_entropy_with_logits(output[:, 0], labels.double())
    for name in ("bce", "cross_entropy"):
        torch.testing.assert_close(plain_loss(keys(name=name), output, labels), wanted)
    of_images = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
    for name, function in of_images.items():
        image = torch.zeros_like(output) + 3
        assert plain_loss(keys(name=name), output, image) == function(output, image)
    likely = output.sigmoid()[:, 0]
    dice = 1 - (2 * (likely * labels).sum() + 1) / (likely.sum() + labels.sum() + 1)
    torch.testing.assert_close(plain_loss(keys(name="dice"), output, labels), dice)


OF_A_USER = """
import sys, hires.losses
hires.losses.__path__.append({folder!r})
from hires.core.config.run_config import from_dict
from hires.core.losses import loss_named
keys = {{"name": "huber", "args": {{"delta": 0.5}}}}
loss = from_dict({{"model": {{"name": "edsr"}}, "loss": keys}}).objective
assert "torch" not in sys.modules
import torch
import torch.nn.functional as F
output, target = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64)
parts = [loss_named(loss).sums(output[..., a:b], target[..., a:b]) for a, b in ((0, 2), (2, 5))]
wanted = F.huber_loss(output, target, delta=0.5)
torch.testing.assert_close(loss_named(loss).value(sum(parts)), wanted)
"""


def test_loss_is_one_class_in_a_module_that_is_found_by_scanning(python):
    folder = Path(__file__).parents[1] / "helpers" / "scanned_losses"
    answer = python("-c", OF_A_USER.format(folder=str(folder)))
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "l1", "args": {"delta": 1}}, "loss.args.delta is no argument of loss=l1, which"),
        ({"name": "focal"}, "loss='focal' is unknown; choose one of auto, cross_entropy, bce"),
        (
            {"name": "l2", "ignore_index": 3},
            "loss.ignore_index=3 is for loss=auto or",
        ),
        ({"weights": [1.0, -1.0]}, "loss.weights=-1.0 must be at least 0"),
        ({"name": "custom"}, "loss=custom needs loss.target"),
    ],
)
def test_wrong_loss_is_answered_with_the_remedy(values: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        from_dict({"loss": values})


def test_weights_of_another_number_of_classes_are_an_error_of_the_plan():
    plan = plan_of(config_of(loss={"name": "cross_entropy", "weights": [1.0, 2.0]}))
    [error] = [one for one in plan.findings if one.severity == "error"]
    assert error.key == "loss.weights"
    assert "are 2 factors, and the network returns 4 classes" in error.text


@pytest.mark.dist
@pytest.mark.parametrize(
    ("function", "net", "parallel", "expected"),
    [
        ("whole_only", UNET, {"tiles": [2, 1]}, "has no argument reduction, .* as parallel=sp.lp"),
        ("no_number", {}, {}, r"returns a tensor \[2\]; return (one|a tensor)"),
        ("noisy", UNET, {"tiles": [2, 1]}, "draws random numbers, .* as parallel=sp.lp"),
        ("noisy", {}, {"stages": 2, "local_dp": 2}, "draws random numbers, .* as parallel=sp.lp"),
    ],
)
def test_function_that_is_no_loss_is_refused(function, net, parallel, expected, tmp_path: Path):
    loss = {"name": "custom", "target": f"tests.helpers.losses:{function}"}
    with pytest.raises((AssertionError, ConfigError), match=expected):
        verified(tmp_path, **net, loss=loss, parallel=parallel)
