"""What ranks do on a device that is no CPU: the simulated one behaves as a GPU would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError
from hires.engine.device import open_device
from tests.helpers import device_jobs
from tests.helpers.device_jobs import MUTATIONS
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.parity_rows import on_each
from tests.helpers.pool import FRESH
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import losses, make

NETS = "tests.helpers."
DATA = {"classes": 5, "length": 16}


def custom(name: str, **args: Any) -> dict[str, Any]:
    return {"model": {"name": "custom", "target": NETS + name, "args": args}, "data": DATA}


@pytest.mark.dist
def test_run_is_bitwise_that_of_the_cpu_and_goes_on_there(tmp_path: Path):
    # Step by step; also from the checkpoint of the other device, either way.
    keys: dict[str, Any] = {
        **custom("custom_nets:Furnished", classes=5),
        "steps": 4,
        "precision": {"name": "fp16"},
        "checkpoint": {"every": 2, "keep": 5},
        "parallel": {"tiles": [2, 1]},
    }
    devices = ("cpu", "simulated")
    first = [make(tmp_path / device, device=device, **keys) for device in devices]
    then = []
    for device, other in zip(devices, reversed(first), strict=True):
        resumed = keys["checkpoint"] | {"resume": str(other / "checkpoints" / "step000002")}
        then.append(
            make(tmp_path / f"{device} again", device=device, **keys | {"checkpoint": resumed})
        )
    for folders in (first, then):  # the second ones read what the first ones wrote
        FRESH.run(run_folders, 2, [str(folder) for folder in folders])
    expected = losses(first[0], 0)
    assert losses(first[1], 0) == expected
    later = {key: loss for key, loss in expected.items() if key[0] >= 2}
    assert later
    assert [losses(folder, 0) for folder in then] == [later, later]


@pytest.mark.dist
def test_each_missing_move_to_the_device_and_memory_freed_early_fails():
    parallel = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}
    config = config_of(
        batch=4, device="simulated", parallel=parallel, **custom("custom_nets:Furnished", classes=5)
    )
    given = to_dict(config), plan_of(config).to_dict()
    [found] = run_ranks(device_jobs.mutate_each, 1, *given)
    assert found.keys() == MUTATIONS.keys()
    assert "keep_for" in found.pop("memory of images")
    assert all("two devices" in error for error in found.values()), found


@pytest.mark.dist
@pytest.mark.parametrize("name", on_each({"simulated": "simulated"}))
def test_messages_of_a_device_go_through_buffers_that_are_used_again(name: str, device: str):
    name = name if device == "cpu" else device
    for rank, found in enumerate(run_ranks(device_jobs.staged_messages, 2, name)):
        for step in range(3):
            assert found[f"message {step}"] == 1 - rank + step
            assert found[f"sum {step}"] == 1 + 2 * step
            assert found[f"sums {step}"] == [1.0, 1.0]
            assert found[f"gather {step}"] == (name, [[0, 0], [1, 1]])
        assert found["buffers 0"] == found["buffers 2"]


@pytest.mark.dist
def test_module_that_makes_a_tensor_on_the_wrong_device_is_named():
    config = config_of(device="simulated", **custom("custom_nets:Careless"))
    [error] = run_ranks(device_jobs.careless_step, 1, to_dict(config))
    assert "custom_nets.py" in error
    assert "device=x.device" in error


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="built for CPUs"):
        open_device("cuda", 0)
