"""Is a network traced once for each content of its files, and a damaged cache no harm?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hires.cli import tracing
from hires.cli.tracing import TorchProcess
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig

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


@pytest.mark.slow
def test_edit_while_a_warm_process_waits_is_kept_with_its_trace(
    cache, counted, tmp_path, monkeypatch
):
    """Its children import the file that is there when they begin, however old the process is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "net.py").write_text(NET)
    config = RunConfig(image=8, batch=2, model=ModelConfig("custom", target="net:net"))
    for width in (4, 5):  # the first trace starts the warm process
        (tmp_path / "width.py").write_text(f"WIDTH = {width}\n")
        time.sleep(0.1)  # longer than a tick of the file's clock
        counted.clear()
        for _ in range(2):
            with TorchProcess() as process:
                graph = process.trace(config)
                assert graph.shape(graph.output)[1] == width
    assert counted.count("tracing the network") == 1


@pytest.mark.parametrize("sources", [None, 3, {"/nowhere": "0"}, {"/nowhere": 3}])
def test_sources_that_cannot_be_compared_are_not_the_same(sources):
    assert not tracing.same_sources(sources)
    assert tracing.same_sources({})


def test_key_holds_what_decides_the_trace():
    def key(**keys) -> str:
        return tracing.trace_key(RunConfig(**keys))

    assert key(batch=4) != key(batch=8)
    assert key(image=32) != key(image=64)
    assert key(seed=1) == key(seed=2)
    custom = ModelConfig("custom", target="net:net")
    assert key(seed=1, model=custom) != key(seed=2, model=custom)


@pytest.mark.slow
def test_files_that_torch_generates_are_no_source_of_a_network():
    # They lie in a temporary folder that goes with the process: no trace was ever the same.
    code = (
        "import torch.distributed.nn, json, sys\n"
        "from hires.nets.custom import own_sources, source_hashes\n"
        "assert '_remote_module_non_scriptable' in sys.modules\n"
        "print(json.dumps([own_sources('torch.nn:Identity'), source_hashes()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], {}]


@pytest.mark.slow
def test_modules_of_a_hook_are_sources_only_of_a_network_that_imports_them(tmp_path):
    files = {
        "hook/sitecustomize.py": "import profile_hook, sizes, mine.early",
        "hook/profile_hook.py": "",
        "hook/sizes.py": "WIDTH = 4",
        "mine/__init__.py": "",
        "mine/early.py": "",
        "mine/net.py": "from torch import nn\nfrom .blocks import WIDTH\n"
        "def net():\n    return nn.Conv2d(3, WIDTH, 1)\n",
        "mine/blocks.py": "from sizes import WIDTH",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = (
        "import json, sys\n"
        "from hires.nets.custom import custom, own_sources\n"
        "assert 'profile_hook' in sys.modules\n"
        "custom('mine.net:net', {})\n"
        "print(json.dumps([one['module'] for one in own_sources('mine.net:net')]))\n"
    )
    path = os.pathsep.join(map(str, (tmp_path / "hook", REPOSITORY, tmp_path)))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["mine", "mine.blocks", "mine.early", "mine.net", "sizes"]
