"""The front end talks to ``python -m hires.engine.torch_server``: JSON in and out, nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hires.comm import rehearsal
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.training_config import TaskConfig
from hires.core.errors import RunError
from hires.engine.build import contexts_of, made_tensors
from hires.engine.torch_server import reply_to
from hires.nets.trace import trace_config
from hires.plan.graph import Graph, describe
from hires.plan.planner import make_plan

REPOSITORY = Path(__file__).resolve().parents[2]

NOISY = """
import atexit, os, sys
from torch import nn

print("at import")
os.write(1, b"from below Python\\n")
atexit.register(print, "at the end")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        print("in forward", file=sys.__stdout__)
        return self.conv(x).mean((2, 3))
"""


def test_process_answers_whatever_a_network_prints(tmp_path):
    # What was printed by way of sys.__stdout__, in C or at exit came before and after the graph.
    (tmp_path / "noisy.py").write_text(NOISY)
    config = RunConfig(image=[9, 8], batch=2, model=ModelConfig("custom", target="noisy:Net"))
    values = to_dict(config)
    broken = {**values, "model": {"name": "custom", "target": "nowhere:net"}}
    done = subprocess.run(
        [sys.executable, "-m", "hires.engine.torch_server"],
        input="".join(json.dumps({"trace": one}) + "\n" for one in (values, broken)),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    answer, error = map(json.loads, done.stdout.splitlines())
    graph = Graph.from_dict(answer["graph"])
    assert [node.kind for node in graph.nodes] == ["conv2d", "mean"]
    assert graph.input_shape == [2, 3, 9, 8]
    assert error["error"]["text"].startswith("model.target='nowhere:net' cannot be imported")
    for words in ("at import", "from below Python", "in forward", "at the end"):
        assert words in done.stderr


def test_operator_that_a_rank_cannot_run_is_named_with_its_layer():
    config = RunConfig(image=16, batch=2, model=ModelConfig("preact_resnet", depth=11, classes=3))
    plan = make_plan(config, Graph.from_dict(reply_to({"trace": to_dict(config)})["graph"]))
    node = next(node for node in plan.graph.nodes if node.kind == "flatten")
    node.args["start_dim"] = 7
    question = {"config": to_dict(config), "plan": plan.to_dict()}
    error = reply_to({"memory": json.loads(json.dumps(question))})["error"]
    assert error["type"] == "PlanError"
    assert error["text"].startswith(
        "a rank cannot run its step: IndexError: Dimension out of range"
    )
    assert error["text"].endswith(f"(in {describe(node)})")


WIDE = """
import os
from torch import nn

def net():
    return nn.Conv2d(3, int(os.environ["WIDE"]), 3)
"""


def test_network_that_is_built_otherwise_than_planned_is_refused(tmp_path, monkeypatch):
    (tmp_path / "wide_net.py").write_text(WIDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WIDE", "4")
    task = TaskConfig("infer")
    model = ModelConfig("custom", target="wide_net:net")
    config = RunConfig(image=8, batch=2, model=model, task=task)
    plan = make_plan(config, trace_config(config))
    monkeypatch.setenv("WIDE", "5")
    with rehearsal(0):
        contexts = contexts_of(plan, 0)
    with pytest.raises(RunError, match=r"built weight of shape \[5, 3, 3, 3\], and \[4, "):
        made_tensors(config, contexts)
