"""What a network is built from belongs to its run, and a kept trace is never stale: modules, files
that it reads, variables, and what it built."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hires.cli import tracing
from hires.cli.tracing import TorchProcess
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig
from hires.core.store.frozen import RunInputs, network_changes
from hires.core.store.rundir import create, run_path
from tests.helpers.new_runs import ARGV, PLAN

REPOSITORY = Path(__file__).resolve().parents[2]
NET = "from torch import nn\nfrom width import WIDTH\n\ndef net():\n"
NET += "    return nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hires"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process with torch was asked."""
    asked: list[str] = []
    ask = TorchProcess._ask

    def count(self, what, question):
        asked.append(what)
        return ask(self, what, question)

    monkeypatch.setattr(TorchProcess, "_ask", count)
    return asked


def write_source(folder: Path, width: int) -> None:
    (folder / "width.py").write_text(f"WIDTH = {width}\n")
    for file in folder.glob("*.py"):  # edited well before anything is started
        os.utime(file, (time.time() - 60, time.time() - 60))


def test_edit_of_a_module_that_the_network_imports_is_never_stale(
    cache, counted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "net.py").write_text(NET)
    config = RunConfig(image=8, batch=2, model=ModelConfig("custom", target="net:net"))

    def channels() -> int:
        with TorchProcess() as process:
            graph = process.trace(config)
            return graph.shape(graph.output)[1]

    write_source(tmp_path, 4)
    assert [channels(), channels()] == [4, 4]
    assert counted == ["tracing the network", "building the network"]
    [entry] = (cache / "trace").iterdir()
    assert str(tmp_path / "width.py") in entry.read_text()
    write_source(tmp_path, 5)
    assert [channels(), channels()] == [5, 5]
    assert counted.count("tracing the network") == 2


def test_sources_that_changed_or_cannot_be_compared_are_not_the_same(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("relu")
    same = {str(file): hashlib.sha256(b"relu").hexdigest()}
    assert tracing.same_sources(same)
    file.write_text("gelu")
    for sources in (same, None, {"/nowhere": "0"}, {"/nowhere": 3}):
        assert not tracing.same_sources(sources)


def test_key_holds_what_decides_the_trace():
    def key(**keys) -> str:
        return tracing.trace_key(RunConfig(**keys))

    assert key(batch=4) != key(batch=8)
    assert key(image=32) != key(image=64)
    assert key(seed=1) == key(seed=2)
    custom = ModelConfig("custom", target="net:net")
    assert key(seed=1, model=custom) != key(seed=2, model=custom)


READS = """
import ctypes, json, os
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent
def below_python(name):
    # As a library in C reads it: Python reports no such file.
    libc = ctypes.CDLL(None)
    file = libc.open(bytes(HERE / name), os.O_RDONLY)
    text = ctypes.create_string_buffer(100)
    libc.read(file, text, 99)
    libc.close(file)
    return json.loads(text.value)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        width = json.loads((HERE / "widths.json").read_text())
        self.names = (HERE / "classes.txt").read_text().split()
        self.conv = nn.Conv2d(3, width, 3)
        self.fc = nn.Linear(width, len(self.names))
        self.register_buffer("scale", torch.tensor(below_python("scale.json")))

    def forward(self, x):
        slope = float(os.environ.get("SLOPE", "0.1"))  # what is built is the same
        x = nn.functional.leaky_relu(self.conv(x), slope).mean((2, 3))
        return self.fc(x) * self.scale
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    os.utime(folder / name, (time.time() - 60, time.time() - 60))  # well before anything starts


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], RunInputs]:
    """What another command finds a network to be built from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name, text in {
        "net.py": READS,
        "widths.json": "4",
        "classes.txt": "cat dog",
        "scale.json": "1.0",
    }.items():
        write(tmp_path, name, text)
    return read_inputs


CONFIG = RunConfig(image=8, batch=2, model=ModelConfig("custom", target="net:Net"))


def read_inputs() -> RunInputs:
    with TorchProcess() as process:
        process.trace(CONFIG)
        [inputs] = process.networks.values()
    # Without the modules of this test suite, which some of the processes have.
    own = tuple(one for one in inputs.network if Path.cwd() in Path(one.path).parents)
    return replace(inputs, network=own)


def test_what_a_network_reads_is_part_of_the_run(inputs, tmp_path, monkeypatch):
    first = inputs()
    assert {Path(one.path).name for one in first.network} == {
        "net.py",
        "widths.json",
        "classes.txt",
    }
    assert inputs() == first
    assert RunInputs.from_dict(json.loads(json.dumps(asdict(first)))) == first
    names = {create(CONFIG, PLAN, ARGV, first).name}
    for edit, words in (
        (("classes.txt", "cat cow"), "classes.txt changed"),  # which builds the same
        (("widths.json", "5"), "widths.json changed"),
        (("scale.json", "2.0"), "the first values of scale of the network changed"),
    ):
        before = inputs()
        write(tmp_path, *edit)
        after = inputs()
        assert network_changes(before, after) == words
        names.add(create(CONFIG, PLAN, ARGV, after).name)
    monkeypatch.setenv("SLOPE", "0.2")
    before, after = after, inputs()
    assert network_changes(before, after) == "an operation of the network changed"
    names.add(create(CONFIG, PLAN, ARGV, after).name)
    assert len(names) == 5
    assert run_path(CONFIG, before).name in names
