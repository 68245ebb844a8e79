"""Do all holders of a stage get the weights that one of them has read, bit for bit?"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hires import comm
from hires.core.config.run_config import from_dict, to_dict
from hires.core.errors import PREEMPTED
from hires.core.ranks.world import World
from hires.core.store import attempts
from hires.engine import weights_file
from hires.engine.build import build_rank
from hires.engine.tensorfile import TensorFile
from hires.plan.plan import Plan
from tests.helpers.jobs import join
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, make, numbered

CUSTOM = {"name": "custom", "target": "tests.engine.test_weight_sharing:from_own_file"}


class Odd(nn.Module):
    """Parameters and buffers of many types and orders, from numbers that each process reads."""

    def __init__(self, classes: int, value: float) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, classes, 1)
        self.register_buffer("turned", torch.full((3, 8), value).t()[:, :1].clone().t())
        nn.init.constant_(self.body.weight, value)
        nn.init.constant_(self.head.weight, 1 / value)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.body(x)))
        return self.head(x * self.turned.sum()).mean((2, 3))


def from_own_file(classes: int = 4) -> nn.Module:
    """A network whose weights lie in a file that differs from node to node."""
    return Odd(classes, 1.0 + OWN_FILE[0])


OWN_FILE = [0]


def build(world: World, config: dict[str, Any], plan: dict[str, Any]) -> dict[str, list]:
    """Builds a rank whose file differs from those of the others; returns its numbers."""
    OWN_FILE[0] = world.rank
    made = Plan.from_dict(plan)
    join(world, made)
    with mock.patch.object(weights_file, "PIECE_BYTES", 100):
        engine = build_rank(from_dict(config), made, world.rank, 1)
    tensors = {name: tensor.flatten().tolist() for name, tensor in engine.tensors.items()}
    engine.close()
    comm.shutdown()
    return tensors


@pytest.mark.dist
def test_weights_of_own_code_are_those_of_one_rank(tmp_path):
    gems = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}
    config = config_of(model=CUSTOM, parallel=gems, batch=4)
    plan = plan_of(config)
    assert plan.ok, plan.findings
    ranks = run_ranks(build, plan.world, to_dict(config), plan.to_dict())
    held = {name for tensors in ranks for name in tensors}
    assert {"body.weight", "head.weight", "turned"} <= held
    for name in held:
        first, *others = [tensors[name] for tensors in ranks if name in tensors]
        assert others, name
        assert all(first == other for other in others), name


def counting(world: World, folder: str, number: int, stop_at: int | None) -> tuple[int, list[str]]:
    """Runs an attempt; returns its exit code and the tensors whose numbers the rank read."""
    read, tensor = [], TensorFile.tensor

    def counted(file: TensorFile, name: str) -> Tensor:
        read.append(f"{file.path.name} {name}")
        return tensor(file, name)

    TensorFile.tensor = counted  # type: ignore[method-assign]
    return numbered(world, folder, number, stop_at), read


@pytest.mark.dist
def test_each_file_of_a_checkpoint_is_read_by_one_rank(tmp_path):
    gems = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems", "replicas": 2}
    run = make(tmp_path, batch=8, steps=3, parallel=gems)
    assert set(attempt(run, stop_at=2)) == {PREEMPTED}
    done = run_ranks(counting, 6, str(run), attempts.next_attempt(run), None)
    assert {code for code, _ in done} == {0}
    by_rank = [{line.split()[0] for line in read} for _, read in done]
    assert set().union(*by_rank) == {
        *(
            f"{kind}0{stage}.safetensors"
            for kind in ("stage", "momentum_buffer")
            for stage in (0, 1)
        )
    }
    assert sum(map(len, by_rank)) == 4
    assert all(len(read) == len(set(read)) for _, read in done)
