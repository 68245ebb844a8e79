"""Is a point whose planning raises an error a failed one, and not one that cannot fit?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.store import campaign

NET = """
from torch import nn


def net(width=4):
    if width == 5:
        raise RuntimeError("no such width")
    head = 7 if width == 6 else width  # a shape error in the forward pass
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.Flatten(1), nn.Linear(head * 256, 10))
"""
WORDS = ("model=custom", "model.target=raising_net:net", "image=16", "batch=2", "steps=3")


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("raising_net.py").write_text(NET)


def test_a_raising_point_fails_the_sweep_and_stops_no_other(hires, fake_ranks, net):
    words = (*WORDS, "+model.args.width=5,4,6", "measure.warmup=1")
    answer = hires("sweep", *words, "--json")
    assert answer.code == 1
    facts = json.loads(answer.out)
    assert [point["state"] for point in facts["excluded"]] == ["failed"] * 2
    assert [point["state"] for point in facts["points"]] == ["done"]
    for width in (5, 6):
        assert f"width={width} failed" in answer.err
    assert {one.state for one in campaign.read(Path("results/default")).excluded} == {"failed"}
    assert hires("status", "default").out.count("failed") >= 2
