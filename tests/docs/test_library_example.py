"""Do the examples of the docs run, and train as the plain module does?"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from tests.helpers.library_page import script
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import documented_engine, plain_steps_of_documented_engine

DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"


def plain(text):
    """Returns the script without hires and DDP, on whole images."""
    text = re.sub(r"^model = (hires|Distributed).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^mesh = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^rows, cols = .*\n", "rows = cols = slice(None)\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^torch\.save.*$", "torch.save(model.state_dict(), 'plain.pt')", text, flags=re.M
    )
    assert "hires." not in text
    return text


def states(folder, text):
    """Returns what the script under torchrun, and the plain one, have saved."""
    (folder / "train.py").write_text(text)
    (folder / "plain.py").write_text(plain(text))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for words in ([*start, "train.py"], [sys.executable, "plain.py"]):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "Warning: " not in done.stderr
    ours, theirs = (
        torch.load(folder / name, weights_only=True) for name in ("model.pt", "plain.pt")
    )
    assert [*ours] == [*theirs]
    return [(name, ours[name], tensor) for name, tensor in theirs.items()]


@pytest.mark.dist
def test_script_trains_as_the_plain_module_under_autocast(tmp_path):
    text = script()
    assert all(word in text for word in ("autocast", "AdamW", "clip_grad_norm_"))
    for name, ours, theirs in states(tmp_path, text):
        # Both round to bfloat16, and a gradient near 0 may come out with another sign: then AdamW
        # moves a parameter by the rate, 1e-3, one way or the other, in each of five steps. Means
        # of the batch norm are sums of 27 products with such weights.
        bound = 5 * 2e-3
        assert float((ours - theirs).abs().max()) <= bound, name
        # Most gradients are no such ones: bfloat16 keeps 8 bits, so steps differ by 2^-6 at most
        # where a gradient is a sum of rounded products.
        assert float((ours - theirs).abs().median()) <= 5e-3 * 2**-6, name


@pytest.mark.dist
def test_script_is_exact_in_float64(tmp_path):
    text = script().replace("import torch\n", DOUBLE, 1)
    text = text.replace("dtype=torch.bfloat16", "enabled=False")
    assert "float64" in text
    assert "enabled=False" in text
    for name, ours, theirs in states(tmp_path, text):
        assert float((ours - theirs).abs().max()) <= 1e-10 * max(1, float(theirs.abs().max())), name


@pytest.mark.dist
def test_engine_of_the_docs_steps_as_plain_torch():
    loss, parameters = plain_steps_of_documented_engine()
    held = set()
    for found, own in run_ranks(documented_engine, 2):
        assert found == pytest.approx(loss, rel=1e-10)
        for name, value in own.items():
            assert abs(value - parameters[name]).max() < 1e-10, name
            held.add(name)
    assert held == {*parameters}
