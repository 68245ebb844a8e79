"""A traced network, so that one slow start of torch serves all tests of the verbs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from hires.cli import launching
from hires.cli.tracing import trace
from hires.core.config import ModelConfig, RunConfig
from hires.plan.graph import Graph

SMALL = ("model=resnet18", "image=32", "batch=4", "steps=3", "measure.warmup=1")
"""Overrides whose network ``traced`` holds, for one microbatch of four."""


@pytest.fixture(scope="session")
def graph() -> Graph:
    """The network of SMALL, traced by the real process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        return trace(RunConfig(image=32, batch=4, model=ModelConfig(depth=18, classes=10)))


@pytest.fixture
def traced(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The verbs get the network at once instead of tracing it."""
    monkeypatch.setattr("hires.cli.prepare.trace", lambda config: graph)
    return graph


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch):
    """The verbs start ranks without torch; call it with {rank: behaviour} (see fake_rank.py)."""

    def behave(ranks: dict[str, str]) -> None:
        monkeypatch.setenv("FAKE_RANKS", json.dumps(ranks))

    behave({})
    fake = functools.partial(launching.launch, module="tests.helpers.fake_rank")
    monkeypatch.setattr(launching, "launch", fake)
    return behave
