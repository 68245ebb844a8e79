"""A traced network, fake ranks and finished runs: one slow start of torch serves all verbs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli import execution, planning
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.launcher.kinds import this_machine
from hires.launcher.ranks import spawn
from hires.plan.graph import Graph
from hires.plan.passes.int8_arithmetic import stored_params
from hires.quant.affine import LARGEST
from hires.quant.scales import MARK
from tests.helpers import commands
from tests.helpers.commands import REPOSITORY, SMALL, TRAINED
from tests.helpers.fake_torch import fake_torch

FAKE_RANK = "tests.helpers.fake_rank"


@pytest.fixture(scope="session")
def graph() -> Graph:
    """The network of SMALL, traced by the real process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        with planning.TorchProcess() as process:
            model = ModelConfig(depth=18, classes=10)
            return process.trace(RunConfig(image=32, batch=4, model=model))


def answer_at_once(patch: pytest.MonkeyPatch, graph: Graph, cache: Path) -> None:
    """The verbs get the network, and ranks of one MiB, at once instead of asking torch."""

    class Process(fake_torch(lambda config: graph)):  # type: ignore[misc]
        def quantised(self, config, plan, path, mark):
            facts = {name: plan.graph.params[name] for name in stored_params(plan.graph)}
            zeros = {n: np.zeros(one.shape, one.dtype) for n, one in facts.items()}
            save_file(zeros, path, {MARK: mark})
            return {"bytes": 10 << 20, "float_bytes": 40 << 20, "weight_noise_db": {"conv1": 40.25}}

        def output_noise(self, config, plans):
            assert {
                n: p.graph.by_name["conv1"].args["largest"] for n, p in plans.items()
            } == LARGEST
            return {"int8": (33.25, None), "int7": (27.5, 0.975)}

    patch.setattr(planning, "TorchProcess", Process)
    patch.setenv("XDG_CACHE_HOME", str(cache))


def start_fake_ranks(patch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """The verbs start ranks without torch; returns what sets {rank: behaviour} (fake_rank.py)."""

    def behave(ranks: dict[str, str]) -> None:
        patch.setenv("HIRES_FAKE_RANKS", json.dumps(ranks))

    behave({})
    patch.setattr(this_machine, "launch", functools.partial(this_machine.launch, module=FAKE_RANK))
    queue = functools.partial(execution.LocalQueue, module=FAKE_RANK)
    patch.setattr(execution, "LocalQueue", queue)
    return behave


@pytest.fixture
def traced(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The verbs get the network at once; see ``answer_at_once``."""
    answer_at_once(monkeypatch, graph, tmp_path / "cache")
    return graph


@pytest.fixture
def fake_ranks(monkeypatch, lean_forks) -> Callable[[dict[str, str]], None]:
    """The verbs start ranks without torch; call it with {rank: behaviour}."""
    return start_fake_ranks(monkeypatch)


@pytest.fixture(scope="session")
def finished_results(graph, _lean_process, tmp_path_factory) -> Path:
    """A folder of results with one complete run of SMALL on two tiles."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        before = spawn._current
        spawn.use(_lean_process)
        answer_at_once(patch, graph, folder / "cache")
        start_fake_ranks(patch)
        commands.hires(folder, "run", *SMALL, "parallel=sp")
        spawn.use(before)
    return folder / "results"


@pytest.fixture
def finished(finished_results: Path, tmp_path: Path, hires: object, traced: Graph) -> Path:
    """A copy of the complete run, below the current folder."""
    shutil.copytree(finished_results, tmp_path / "results")
    [config] = (tmp_path / "results").glob("*/*/config.yaml")
    return config.parent


@pytest.fixture(scope="session")
def trained(_warm_process, tmp_path_factory) -> Path:
    """The folder of a training on real ranks; it is below results/net."""
    folder = tmp_path_factory.mktemp("trained")
    _, err = commands.hires(folder, "run", *TRAINED)
    assert "trains with" not in err
    [run] = (folder / "results/net").iterdir()
    return run


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Stands for the programs of a cluster: call it with a name and a line of shell."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return functools.partial(commands.stand_in, folder)
