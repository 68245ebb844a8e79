"""How the process with torch is asked: what it answers, and what happens if it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.cli.tracing import TorchProcess
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError, RunError


def trace(config: RunConfig, module: str):
    with TorchProcess(module) as process:
        return process.trace(config)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a module that stands for ``hires.engine.footprint`` and runs the given lines."""

    def make(text: str) -> str:
        (tmp_path / "fake_trace.py").write_text("import json, sys\n" + text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("HIRES_CACHE", "off")
        return "fake_trace"

    return make


@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_errors_keep_their_class_and_text(process, kind):
    body = {"error": {"type": kind.__name__, "text": "because"}}
    module = process(f"print(json.dumps({body!r}))\n")
    with pytest.raises(kind, match=r"^because$"):
        trace(RunConfig(), module)


@pytest.mark.parametrize("text", ["raise ValueError('boom')\n", "print('[]')\n"])
def test_process_that_breaks_is_one_paragraph(process, text):
    with pytest.raises(RunError, match="tracing the network failed") as caught:
        trace(RunConfig(), process(text))
    assert "\n" not in str(caught.value)


def test_process_that_broke_is_started_again_by_the_next_question(process, tmp_path):
    module = process(
        "from pathlib import Path\n"
        f"seen = Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n"
        "    seen.touch()\n"
        "    sys.exit(3)\n"
        "graph = {'nodes': [], 'output': 'fc', 'input_shape': [1], 'params': {}}\n"
        "print(json.dumps({'graph': graph, 'network': []}))\n"
    )
    with TorchProcess(module) as asked:
        with pytest.raises(RunError, match="exit code 3"):
            asked.trace(RunConfig())
        assert asked.trace(RunConfig()).input_shape == [1]
