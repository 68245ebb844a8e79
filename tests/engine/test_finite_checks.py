"""Numbers that are not finite end a run, with tensor, file, samples, true cause and remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import hires.comm
from hires.comm import rehearsal
from hires.core.config.run_config import RunConfig
from hires.core.errors import LossError, RunError
from hires.engine.build import build_rank, whole_model
from hires.engine.weights_file import open_weights
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.saved import attempt, make

NAN, INF = float("nan"), float("inf")
NET = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": [32, 32]}
EARLIER = "earlier checkpoint"


def started(config: RunConfig) -> float | None:
    weights = open_weights(str(config.weights))
    with rehearsal(0):
        engine = build_rank(config, plan_of(config), 0, 1, weights=weights)
        loss = engine.executor.step(engine.loaders).loss
        engine.close()
    return loss


def damaged(path: Path, name: str, place: tuple[int, ...], value: float, **keys: Any) -> RunConfig:
    config = config_of(precision={"name": "fp32"}, **keys)
    state: dict[str, Tensor] = {n: t.clone() for n, t in whole_model(config).state_dict().items()}
    state[name] = state[name].double()
    state[name][place] = value
    save_file({n: t.contiguous() for n, t in state.items()}, path / "w.safetensors")
    config.weights = str(path / "w.safetensors")
    return config


@pytest.mark.parametrize(
    ("task", "precision", "name", "place", "value", "words"),
    [
        # A weight behind which a norm is folded, a variance, and a layer that is not folded.
        ("infer", "fp32", "layer2.0.conv1.weight", (1, 2, 0, 1), NAN, (EARLIER, "nan at [1, 2, 0")),
        ("infer", "fp32", "bn1.running_var", (0,), -1.0, (EARLIER, "-1 at [0], 1 of")),
        ("calibrate", "fp32", "fc.bias", (1,), -INF, (EARLIER, "-inf at [1], 1 of")),
        ("infer", "fp16", "fc.weight", (1, 1), 1e5, ("inf at [1, 1]", "use precision=bf16")),
        # The loss of a training was nan after the first step, and a smaller lr the remedy.
        ("train", "fp32", "bn1.weight", (1,), NAN, ("other",)),
        ("train", "fp32", "fc.weight", (1, 1), 1e300, ("other",)),
        ("train", "fp16", "conv1.weight", (1, 1), 1e6, ("other",)),
    ],
)
def test_tensor_its_value_and_its_file_are_named(
    tmp_path, task, precision, name, place, value, words
):
    config = damaged(tmp_path, name, place, value, task={"name": task}, **NET)
    config.precision.name = precision
    with pytest.raises(RunError) as refused:
        started(config)
    text = str(refused.value)
    assert text.startswith(f"{name} of weights={config.weights} ")
    assert all(word in text for word in words)
    assert "lr" not in text.replace(str(config.weights), "")


class Masked(torch.nn.Module):
    """Adds a mask of minus infinity, as attention does."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, classes)
        self.register_buffer("mask", torch.tensor([0.0, -INF, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.softmax(x.mean((2, 3)) + self.mask, 1))  # type: ignore[no-any-return]


def test_a_mask_of_infinities_is_no_fault(tmp_path):
    model = {"name": "custom", "target": f"{__name__}:Masked", "classes": 4}
    keys = {"task": {"name": "infer"}, "model": model}
    started(damaged(tmp_path, "mask", (1,), -INF, **keys))
    with pytest.raises(RunError, match=r"mask of .* is not finite: nan at \[2\]"):
        started(damaged(tmp_path, "mask", (2,), NAN, **keys))


DATA = {"length": 8, "shuffle": False}


def broken_for_class_3(output, labels):
    """A loss of the user's that divides by 0 for one class, which is that of image 3 first."""
    return F.cross_entropy(output, labels) / (labels != 3).all()


def always_broken(output, labels):
    return F.cross_entropy(output, labels) / (labels < 0).sum()


def ended(tmp_path, **keys):
    """Returns what a run said of the loss that ended it."""
    values = {"batch": 2, "parallel": {"microbatches": 2}, "data": DATA, **keys}
    with pytest.raises((AssertionError, LossError)) as caught:
        attempt(make(tmp_path, **values))
    return re.findall(r"the loss is (?:nan|-?inf) at step .*", str(caught.value))[-1]


@pytest.mark.dist
def test_large_steps_are_the_cause_where_they_are(tmp_path):
    said = ended(tmp_path, optimizer={"lr": 1e150})
    assert "a smaller optimizer.lr (now 1e+150) helps" in said
    assert re.search(r"at step [1-9], of the images \d", said)


@pytest.mark.dist
def test_first_step_is_not_blamed_on_the_learning_rate(tmp_path):
    said = ended(tmp_path, loss={"name": "custom", "target": f"{__name__}:always_broken"})
    assert "at step 0, of the images 0, 1;" in said
    assert "optimizer.lr is not the cause" in said
    assert f"loss.target={__name__}:always_broken" in said


@pytest.mark.dist
def test_only_the_samples_of_the_microbatch_are_named(tmp_path):
    keys = {"loss": {"name": "custom", "target": f"{__name__}:broken_for_class_3"}}
    said = ended(tmp_path, **keys, parallel={"replicas": 2}, optimizer={"lr": 1e-9})
    assert "at step 1, of the images 3;" in said


def test_loop_of_the_users_names_samples_too(request):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
    keys = {"image": [8, 8], "batch": 4, "parallel": {"microbatches": 2}}
    request.addfinalizer(hires.comm.shutdown)
    engine = hires.Engine(net, keys)
    images = torch.zeros(4, 3, 8, 8)
    images[3, 0, 0, 0] = torch.nan
    with pytest.raises(LossError, match=r"sample 2, sample 3;.*lr is not the cause"):
        engine.step(images, torch.tensor([0, 1, 0, 1]))
