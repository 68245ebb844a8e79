"""A run is made anew when its network, its images or what these are built from have changed, the
old one is kept, no trace is ever stale, and the process that traces may break."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hires.cli import planning
from hires.cli.tracing import TorchProcess, trace_key
from hires.core.config.fields import build
from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import TaskConfig
from hires.core.errors import PlanError, RunError
from hires.core.store.frozen import RunInputs
from tests.helpers.commands import REPOSITORY, SMALL

CUSTOM = ("model=custom", "model.target=net:net", *SMALL[1:])


def runs() -> list[Path]:
    return sorted(file.parent for file in Path("results").glob("default/*/record.json"))


@pytest.fixture
def net(tmp_path, traced) -> Path:
    """The source of a network of the user's, whose trace is always the same."""
    path = tmp_path / "net.py"
    path.write_text("net = relu")
    return path


def test_edited_network_is_a_new_run(hires, fake_ranks, net):
    assert hires("run", *CUSTOM).code == 0
    [first] = runs()
    record = (first / "record.json").read_text()
    net.write_text("net = gelu")
    answer = hires("run", *CUSTOM)
    assert f"network changed since {first.name} (complete): this is a new run" in answer.err
    assert len(runs()) == 2
    assert (first / "record.json").read_text() == record
    lines = [line.split() for line in hires("show", first.name, "--reproduce").out.splitlines()]
    assert ["net.py", "its", "source", "edited"] in lines
    net.write_text("net = relu")  # the old numbers are those of the old network, and are there
    answer = hires("run", *CUSTOM)
    assert f"complete since an earlier time: {first.absolute()}" in answer.err
    assert "model.source" in hires("compare", runs()[0].name, runs()[1].name).out
    fake_ranks({"0": "exit 3"})
    assert hires("run", *CUSTOM, "seed=1").code == 1
    net.write_text("net = silu")
    answer = hires("retry")
    assert answer.code != 0
    assert "net.py of the network has changed since the run was planned" in answer.err


READS = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, int(Path("width.txt").read_text()), 3)

    def forward(self, x):
        slope = float(os.environ.get("HIRES_SLOPE", "0.1"))
        return nn.functional.leaky_relu(self.conv(x), slope).mean((2, 3))
"""


def test_trace_of_a_users_network_is_never_stale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # as the warm process has
    monkeypatch.setenv("HIRES_CACHE", "on")
    model = ModelConfig("custom", target="net:Net", files=["width.txt"])
    config = RunConfig(image=8, batch=2, model=model)
    (tmp_path / "net.py").write_text(READS)
    seen = []
    for width, slope in ((4, 0.1), (5, 0.1), (5, 0.2)):
        (tmp_path / "width.txt").write_text(str(width))
        monkeypatch.setenv("HIRES_SLOPE", str(slope))
        with planning.Planner() as planner:
            graph, inputs = planner.traced(config), planner.inputs(config)
            (tmp_path / "width.txt").write_text("9")  # the one of before counts for a command
            assert (planner.traced(config), planner.inputs(config)) == (graph, inputs)
        [relu] = (node for node in graph.nodes if node.kind == "leaky_relu")
        args = relu.args.values()
        assert (graph.params["conv.weight"].shape[0], slope in args) == (width, True)
        seen.append(inputs)
    assert (
        seen[1].digests == seen[2].digests != seen[0].digests
    )  # a variable of the environment has no name in the run
    assert build(RunInputs, json.loads(json.dumps(asdict(seen[0])))) == seen[0]


def test_key_holds_what_decides_the_trace():
    custom = ModelConfig("custom", target="net:net")
    infer = {"task": TaskConfig("infer")}
    halves = ParallelConfig(stages=2, microbatches=2)
    for one, other, same in (
        ({"batch": 4}, {"batch": 8}, False),
        ({"batch": 4}, {"batch": 8, "parallel": halves}, True),
        ({"image": 32}, {"image": 64}, False),
        ({}, infer, False),
        ({}, {"model": ModelConfig(depth=18)}, False),
        (infer, {**infer, "precision": PrecisionConfig("bf16")}, False),  # the type of its images
        ({"seed": 1}, {"seed": 2}, True),
        ({"seed": 1, "model": custom}, {"seed": 2, "model": custom}, False),
    ):
        assert (trace_key(RunConfig(**one)) == trace_key(RunConfig(**other))) == same


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('print(\'{"error": {"type": "PlanError", "text": "because"}}\')', PlanError, "^because"),
        ("print('[]')", RunError, "tracing the network failed"),
        ("import sys\nsys.exit(3)", RunError, "exit code 3"),
    ],
)
def test_process_that_breaks_is_one_paragraph_and_is_started_again(
    tmp_path, monkeypatch, text, error, words
):
    answer = '{"graph": {"nodes": [], "output": "fc", "input_shape": [1], "params": {}}}'
    (tmp_path / "fake_trace.py").write_text(
        f"from pathlib import Path\nseen = Path({str(tmp_path / 'seen')!r})\n"
        f"if seen.exists():\n    print({answer!r})\n    raise SystemExit\nseen.touch()\n{text}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HIRES_CACHE", "off")
    with TorchProcess("fake_trace") as process:
        with pytest.raises(error, match=words) as caught:
            process.trace(RunConfig())
        assert "\n" not in str(caught.value)
        if error is RunError:
            assert process.trace(RunConfig()).input_shape == [1]
