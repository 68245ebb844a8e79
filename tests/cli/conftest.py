"""A traced network, so that one slow start of torch serves all tests of the verbs."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli.sweep import execution
from hires.cli.tracing import TorchProcess
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.launcher.kinds import this_machine
from hires.plan.graph import Graph
from hires.plan.memory import RankMemory
from hires.plan.passes.int8_tensors import stored_params
from hires.plan.plan import Plan
from hires.quant.scales import MARK

SMALL = ("model=resnet18", "image=32", "batch=4", "steps=3", "measure.warmup=1")
"""Overrides whose network ``traced`` holds, for one microbatch of four."""


@pytest.fixture(scope="session")
def graph() -> Graph:
    """The network of SMALL, traced by the real process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        with TorchProcess() as process:
            return process.trace(
                RunConfig(image=32, batch=4, model=ModelConfig(depth=18, classes=10))
            )


@pytest.fixture
def traced(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The verbs get the network, and ranks of one MiB, at once instead of asking torch."""

    class Process(contextlib.nullcontext):
        def trace(self, config: RunConfig) -> Graph:
            return graph

        def footprint(self, config: RunConfig, plan: Plan) -> list[dict[str, int]]:
            memory = RankMemory(1 << 18, 1 << 17, 1 << 17, 1 << 18, 1 << 18)
            return [memory.to_dict()] * plan.ranks_per_replica

        def quantised(
            self, config: RunConfig, plan: Plan, path: Path, mark: str
        ) -> dict[str, object]:
            facts = {name: plan.graph.params[name] for name in stored_params(plan.graph)}
            zeros = {n: np.zeros(one.shape, one.dtype) for n, one in facts.items()}
            save_file(zeros, path, {MARK: mark})
            packed = sum(one.dtype == "uint8" for one in facts.values())
            of_weights = {"weight_noise_db": {"conv1": 40.25}, "packed": packed}
            return {"bytes": 10 * 2**20, "float_bytes": 40 * 2**20, **of_weights}

        def start(self) -> None:
            """It is there at once."""

        def __enter__(self) -> Process:
            return self

    monkeypatch.setattr("hires.cli.planning.TorchProcess", Process)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return graph


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch, lean_forks: None):
    """The verbs start ranks without torch; call it with {rank: behaviour} (see fake_rank.py)."""

    def behave(ranks: dict[str, str]) -> None:
        monkeypatch.setenv("HIRES_FAKE_RANKS", json.dumps(ranks))

    behave({})
    fake = functools.partial(this_machine.launch, module="tests.helpers.fake_rank")
    monkeypatch.setattr(this_machine, "launch", fake)
    queue = functools.partial(execution.LocalQueue, module="tests.helpers.fake_rank")
    monkeypatch.setattr(execution, "LocalQueue", queue)
    return behave
