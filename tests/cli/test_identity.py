"""A run is made anew when its network, its images or what these are built from have changed, the
old one is kept, and no trace is ever stale."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hires.cli import planning
from hires.cli.tracing import trace_key
from hires.core.store.built_network import BuiltNetwork, BuiltTensor
from hires.core.store.frozen import RunInputs, SourceFile
from tests.helpers.commands import SMALL

CUSTOM = ("model=custom", "model.target=net:net", *SMALL[1:])


BUILT = ["here", "0123", 1.0, 1.0]


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
            source = SourceFile("net", str(path), sha256)
            first = BuiltTensor("float32[1]", *BUILT[1:])
            built = BuiltNetwork(BUILT[0], "", {"w": first})
            more = "many" in path.read_text()
            self.networks[trace_key(config)] = RunInputs((source,), None, built, more)
            return super().trace(config)

    monkeypatch.setattr(planning, "TorchProcess", Process)
    return path


@pytest.fixture
def images(tmp_path) -> Path:
    for label in range(10):
        path = tmp_path / "images" / str(label) / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), label, np.uint8)).save(path)
    return tmp_path / "images"


def test_edited_network_is_a_new_run(hires, fake_ranks, net):
    assert hires("run", *CUSTOM).code == 0
    [first] = runs()
    record = (first / "record.json").read_text()
    net.write_text("gelu")
    answer = hires("run", *CUSTOM)
    assert f"net.py changed since {first.name} (complete): this is a new run" in answer.err
    assert len(runs()) == 2
    assert (first / "record.json").read_text() == record
    answer = hires("show", first.name, "--reproduce")
    assert ["net.py", "its", "source", "edited"] in [
        line.split() for line in answer.out.splitlines()
    ]
    net.write_text("relu")  # the old numbers are those of the old network, and are there
    answer = hires("run", *CUSTOM)
    assert f"complete since an earlier time: {first.absolute()}" in answer.err
    answer = hires("show", runs()[0].name, "--diff", runs()[1].name)
    assert "model.source" in answer.out
    assert "made from: network " in hires("show", first.name).out


def test_added_image_is_a_new_run_and_a_touched_one_is_not(hires, fake_ranks, traced, images):
    words = ("data=folder", f"data.path={images}", *SMALL)
    assert hires("run", *words).code == 0
    (images / "0" / "0.png").touch()
    assert "complete since an earlier time" in hires("run", *words).err
    (images / "3" / "new.png").write_bytes((images / "0" / "0.png").read_bytes())
    answer = hires("run", *words)
    assert answer.code == 0
    assert "1 image was added (3/new.png) since" in answer.err
    assert len(runs()) == 2


def test_run_that_was_edited_while_it_waited_fails_and_says_so(hires, fake_ranks, net):
    fake_ranks({"0": "exit 3"})
    assert hires("run", *CUSTOM).code == 1
    fake_ranks({})
    net.write_text("gelu")
    answer = hires("retry")
    assert answer.code != 0
    assert "net.py of the network has changed since the run was planned" in answer.err
