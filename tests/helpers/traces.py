"""Graphs of networks for tests, each traced once in a process."""

from __future__ import annotations

import json

from hires.cli.tracing import trace_key
from hires.core.config.run_config import RunConfig
from hires.nets.trace import trace_config
from hires.plan.graph import Graph
from hires.plan.plan import Plan
from hires.plan.planner import make_plan, with_validation

_KEPT: dict[str, str] = {}
"""Key of a trace -> the graph as JSON, so that no test sees what another one changed."""


def graph_of(config: RunConfig) -> Graph:
    """Returns what ``trace_config`` does."""
    key = trace_key(config)
    if key not in _KEPT:
        _KEPT[key] = json.dumps(trace_config(config).to_dict())
    return Graph.from_dict(json.loads(_KEPT[key]))


def plan_of(config: RunConfig) -> Plan:
    """Returns the plan of a config."""
    return with_validation(config, make_plan(config, graph_of(config)), graph_of)
