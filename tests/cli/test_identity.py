"""A run is made anew when its network, its images or what these are built from have changed, the
old one is kept, no trace is ever stale, and the process that traces may break."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hires.cli import planning, tracing
from hires.cli.tracing import TorchProcess, trace_key
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.store.built_network import BuiltNetwork, BuiltTensor
from hires.core.store.frozen import RunInputs, SourceFile, network_changes
from hires.core.store.rundir import create, run_path
from tests.helpers.commands import REPOSITORY, SMALL
from tests.helpers.new_runs import ARGV, PLAN

CUSTOM = ("model=custom", "model.target=net:net", *SMALL[1:])


def runs() -> list[Path]:
    return sorted(file.parent for file in Path("results").glob("default/*/record.json"))


@pytest.fixture
def net(tmp_path, monkeypatch, traced) -> Path:
    """The source of a network of the user's, whose trace is always the same."""
    path = tmp_path / "net.py"
    path.write_text("relu")

    class Process(planning.TorchProcess):
        def __init__(self):
            super().__init__()
            self.networks = {}

        def trace(self, config):
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            built = BuiltNetwork("here", "", {"w": BuiltTensor("float32[1]", "0123", 1.0, 1.0)})
            source = SourceFile("net", str(path), sha256)
            self.networks[trace_key(config)] = RunInputs((source,), None, built, False)
            return super().trace(config)

    monkeypatch.setattr(planning, "TorchProcess", Process)
    return path


def test_edited_network_is_a_new_run(hires, fake_ranks, net):
    assert hires("run", *CUSTOM).code == 0
    [first] = runs()
    record = (first / "record.json").read_text()
    net.write_text("gelu")
    answer = hires("run", *CUSTOM)
    assert f"net.py changed since {first.name} (complete): this is a new run" in answer.err
    assert len(runs()) == 2
    assert (first / "record.json").read_text() == record
    lines = [line.split() for line in hires("show", first.name, "--reproduce").out.splitlines()]
    assert ["net.py", "its", "source", "edited"] in lines
    net.write_text("relu")  # the old numbers are those of the old network, and are there
    answer = hires("run", *CUSTOM)
    assert f"complete since an earlier time: {first.absolute()}" in answer.err
    assert "model.source" in hires("show", runs()[0].name, "--diff", runs()[1].name).out
    fake_ranks({"0": "exit 3"})
    assert hires("run", *CUSTOM, "seed=1").code == 1
    net.write_text("silu")
    answer = hires("retry")
    assert answer.code != 0
    assert "net.py of the network has changed since the run was planned" in answer.err


def test_added_image_is_a_new_run_and_a_touched_one_is_not(hires, fake_ranks, traced, tmp_path):
    images = tmp_path / "images"
    for label in range(10):
        (images / str(label)).mkdir(parents=True)
        pixels = np.full((8, 8, 3), label, np.uint8)
        Image.fromarray(pixels).save(images / str(label) / "0.png")
    words = ("run", "data=folder", f"data.path={images}", *SMALL)
    assert hires(*words).code == 0
    (images / "0" / "0.png").touch()
    assert "complete since an earlier time" in hires(*words).err
    (images / "3" / "new.png").write_bytes((images / "0" / "0.png").read_bytes())
    answer = hires(*words)
    assert (answer.code, "1 image was added (3/new.png) since" in answer.err) == (0, True)
    assert len(runs()) == 2


READS = """
import ctypes, os
from pathlib import Path
import torch
from torch import nn
from width import WIDTH

HERE = Path(__file__).parent
def below_python(name):
    # As a library in C reads it: Python reports no such file.
    libc = ctypes.CDLL(None)
    file = libc.open(bytes(HERE / name), os.O_RDONLY)
    text = ctypes.create_string_buffer(100)
    libc.read(file, text, 99)
    libc.close(file)
    return float(text.value)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = (HERE / "classes.txt").read_text().split()
        self.conv = nn.Conv2d(3, WIDTH, 3)
        self.fc = nn.Linear(WIDTH, len(self.names))
        self.register_buffer("scale", torch.tensor(below_python("scale.txt")))

    def forward(self, x):
        slope = float(os.environ.get("HIRES_SLOPE", "0.1"))  # what is built is the same
        x = nn.functional.leaky_relu(self.conv(x), slope).mean((2, 3))
        return self.fc(x) * self.scale
"""


def test_what_a_network_reads_is_part_of_the_run_and_its_trace_is_never_stale(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # as the warm process has
    monkeypatch.setenv("HIRES_CACHE", "on")
    config = RunConfig(image=8, batch=2, model=ModelConfig("custom", target="net:Net"))
    questions, ask, ages = [], TorchProcess._ask, itertools.count(100, -5)
    monkeypatch.setattr(
        TorchProcess,
        "_ask",
        lambda self, what, question: questions.append(what) or ask(self, what, question),
    )

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        time_s = time.time() - next(ages)  # well before anything starts
        os.utime(tmp_path / name, (time_s, time_s))

    def inputs() -> RunInputs:
        with TorchProcess() as process:
            graph = process.trace(config)
            [found] = process.networks.values()
        assert graph.params["conv.weight"].shape[0] == int((tmp_path / "width.py").read_text()[-1])
        # Without the modules of this test suite, which some of the processes have.
        own = tuple(one for one in found.network if tmp_path in Path(one.path).parents)
        return replace(found, network=own)

    for name, text in (
        ("net.py", READS),
        ("width.py", "WIDTH = 4"),
        ("classes.txt", "cat dog"),
        ("scale.txt", "1.0"),
    ):
        write(name, text)
    first = before = inputs()
    assert {Path(one.path).name for one in first.network} == {"net.py", "width.py", "classes.txt"}
    assert inputs() == first
    assert questions == ["tracing the network", "building the network"]
    assert RunInputs.from_dict(json.loads(json.dumps(asdict(first)))) == first
    names = {create(config, PLAN, ARGV, first).name}
    for edit, words in (
        (("classes.txt", "cat cow"), "classes.txt changed"),  # which builds the same
        (("width.py", "WIDTH = 5"), "width.py changed"),
        (("scale.txt", "2.0"), "the first values of scale of the network changed"),
        (None, "an operation of the network changed"),
    ):
        if edit is None:
            monkeypatch.setenv("HIRES_SLOPE", "0.2")
        else:
            write(*edit)
        after = inputs()
        assert network_changes(before, after) == words
        names.add(create(config, PLAN, ARGV, after).name)
        before = after
    assert len(names) == 5
    assert run_path(config, first).name in names


def test_sources_that_changed_or_cannot_be_compared_are_not_the_same(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("relu")
    same = {str(file): hashlib.sha256(b"relu").hexdigest()}
    assert tracing.same_sources(same)
    file.write_text("gelu")
    assert not any(map(tracing.same_sources, (same, None, {"/nowhere": "0"}, {"/nowhere": 3})))


def test_key_holds_what_decides_the_trace():
    custom = ModelConfig("custom", target="net:net")
    for one, other, same in (
        ({"batch": 4}, {"batch": 8}, False),
        ({"image": 32}, {"image": 64}, False),
        ({"seed": 1}, {"seed": 2}, True),
        ({"seed": 1, "model": custom}, {"seed": 2, "model": custom}, False),
    ):
        assert (trace_key(RunConfig(**one)) == trace_key(RunConfig(**other))) == same


ERROR = '{{"error": {{"type": "{}", "text": "because"}}}}'


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (
            'print(\'{"error": {"type": "ConfigError", "text": "because"}}\')',
            ConfigError,
            "^because",
        ),
        ('print(\'{"error": {"type": "PlanError", "text": "because"}}\')', PlanError, "^because"),
        ("raise ValueError('boom')", RunError, "tracing the network failed"),
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
