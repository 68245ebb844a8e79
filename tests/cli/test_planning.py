"""What is told when a config does not become a plan."""

from __future__ import annotations

import pytest

from hires.cli import planning
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan
from tests.helpers.small_plans import config_of, forked


def planned(config: RunConfig) -> Plan:
    with planning.Planner() as planner:
        return planner.plan(config)


class Refusing:
    """A process that can trace no network."""

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def trace(self, config: RunConfig) -> None:
        raise ConfigError("the network takes no such image")


def test_network_that_cannot_be_traced_hides_no_wrong_number(monkeypatch):
    monkeypatch.setattr(planning, "TorchProcess", Refusing)
    layout = {"replicas": 200, "tiles": [1, 40], "microbatches": 3}
    with pytest.raises(ConfigError) as caught:
        planned(from_dict({"image": 32, "batch": 600, "parallel": layout}))
    for words in ("takes no such image; ", "[parallel.tiles]", "[launcher.max_ranks]"):
        assert words in str(caught.value)


def test_batch_that_does_not_divide_is_the_reason_before_a_trace_of_its_rest(monkeypatch):
    # A larger image was offered beside another batch, which alone was enough.
    monkeypatch.setattr(planning, "TorchProcess", Refusing)
    with pytest.raises(ConfigError) as caught:
        planned(from_dict({"image": 32, "batch": 3, "parallel": {"replicas": 2}}))
    assert str(caught.value).startswith("batch=3 does not divide")
    assert "takes no such image" not in str(caught.value)


def test_layout_that_no_launcher_offers_is_not_proved(monkeypatch):
    # The proof of thousands of tiles took minutes, and what they are too many for came after it.
    class Tracing(Refusing):
        def trace(self, config: RunConfig) -> Graph:
            return forked(4, True)

    def never(*args: object) -> None:
        raise AssertionError("a layout that cannot start is proved")

    monkeypatch.setattr(planning, "TorchProcess", Tracing)
    monkeypatch.setattr("hires.plan.planner.verify", never)
    plan = planned(config_of("train", 7, tiles=[13, 10], microbatches=2))
    assert [f.key for f in plan.findings if f.severity == "error"] == [
        "batch",
        "launcher.max_ranks",
    ]
    assert any("hold nothing" in finding.text for finding in plan.findings)
    plan = planned(config_of("train", 4, tiles=[13, 10]))
    assert not plan.ok


def test_stages_that_are_advised_are_no_more_than_layers(monkeypatch):
    class Tracing(Refusing):
        def trace(self, config: RunConfig) -> Graph:
            return forked(4, True)

    monkeypatch.setattr(planning, "TorchProcess", Tracing)
    layers = len(layer_starts(forked(4, True)))
    findings = planned(config_of("train", 4, stages=100)).findings
    assert [f.key for f in findings] == ["parallel.stages", "launcher.max_ranks"]
    assert all(f"; use parallel.stages={layers}" in f.text for f in findings)
