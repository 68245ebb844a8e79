"""Does the script of the docs run under torchrun, and train as the plain module does?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "library.md"


def script():
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return text


def plain_script():
    """Returns the same script without hires and DDP, on whole images."""
    text = script()
    text = re.sub(r"^model = (hires|Distributed).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^mesh = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^rows, cols = .*\n", "rows = cols = slice(None)\n", text, flags=re.MULTILINE)
    return re.sub(
        r"^torch\.save.*$", "torch.save(model.state_dict(), 'plain.pt')", text, flags=re.M
    )


@pytest.mark.dist
def test_script_trains_as_the_plain_module(tmp_path):
    (tmp_path / "train.py").write_text(script())
    (tmp_path / "plain.py").write_text(plain_script())
    assert "hires." not in plain_script()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for words in ([*start, "train.py"], [sys.executable, "plain.py"]):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "Warning: " not in done.stderr
    ours, theirs = (
        torch.load(tmp_path / name, weights_only=True) for name in ("model.pt", "plain.pt")
    )
    assert [*ours] == [*theirs]
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
