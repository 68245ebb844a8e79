"""Numbers that are not finite never reach a kernel that would hide them, except in a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hires.comm import rehearsal
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.engine.build import build_rank, whole_model
from hires.engine.weights_file import open_weights
from tests.helpers.layouts import config_of, plan_of

NAN, INF = float("nan"), float("inf")


def started(config: RunConfig) -> float | None:
    weights = open_weights(str(config.weights))
    with rehearsal(0, shared_memory=False):
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


CASES = {
    "a weight behind which a norm is folded": ("layer2.0.conv1.weight", (1, 2, 0, 1), NAN),
    "a negative variance": ("bn1.running_var", (0,), -1.0),
    "a layer that is not folded": ("fc.bias", (1,), -INF),
}
NET = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": [32, 32]}


@pytest.mark.parametrize("case", CASES)
def test_inference_refuses_and_names_the_tensor_its_value_and_its_file(tmp_path, case):
    name, place, value = CASES[case]
    task = {"fc.bias": "calibrate"}.get(name, "infer")
    config = damaged(tmp_path, name, place, value, task={"name": task}, **NET)
    with pytest.raises(RunError) as refused:
        started(config)
    text = str(refused.value)
    assert text.startswith(f"{name} of weights={config.weights} is")
    assert f"{value:g} at {[*place]}, 1 of" in text
    assert "earlier checkpoint" in text


@pytest.mark.parametrize(
    ("name", "value", "precision"),
    [
        ("bn1.weight", NAN, "fp32"),
        ("fc.weight", 1e300, "fp32"),
        ("conv1.weight", 1e6, "fp16"),
    ],
)
def test_training_that_begins_with_numbers_it_cannot_hold_names_them(
    tmp_path, name, value, precision
):
    # The loss was nan after the first step, and a smaller lr the remedy.
    net = {**NET, "task": {"name": "train"}}
    place = (1,) if name == "bn1.weight" else (1, 1)
    config = damaged(tmp_path, name, place, value, **net)
    config.precision.name = precision
    with pytest.raises(RunError) as refused:
        started(config)
    text = str(refused.value)
    assert text.startswith(f"{name} of weights={config.weights} ")
    assert "another file" in text or "other weights" in text
    assert "lr" not in text.replace(str(config.weights), "")


def test_layers_that_overflow_a_type_of_16_bits_are_named(tmp_path):
    config = damaged(tmp_path, "fc.weight", (1, 1), 1e5, task={"name": "infer"}, **NET)
    assert started(config) is None
    config.precision.name = "fp16"
    with pytest.raises(RunError, match=r"fc\.weight .*inf at \[1, 1\].*use precision=bf16"):
        started(config)


class Masked(torch.nn.Module):
    """Adds a mask of minus infinity, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.register_buffer("mask", torch.tensor([0.0, -INF, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.softmax(x.mean((2, 3)) + self.mask, 1))  # type: ignore[no-any-return]


def masked() -> torch.nn.Module:
    return Masked()


def test_a_mask_of_infinities_is_no_fault(tmp_path):
    model = {"name": "custom", "target": "tests.engine.test_finite_tensors:masked", "classes": 4}
    keys = {"task": {"name": "infer"}, "model": model}
    config = damaged(tmp_path, "mask", (1,), -INF, **keys)
    started(config)
    with pytest.raises(RunError, match=r"mask of .* is not finite: nan at \[2\]"):
        started(damaged(tmp_path, "mask", (2,), NAN, **keys))
