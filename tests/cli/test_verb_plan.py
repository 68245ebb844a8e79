"""Does ``hires plan`` show the same plan that a run would freeze?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.plan.plan import Plan
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.usefixtures("traced")


def test_plan_shows_grid_time_line_messages_and_verdict(hires):
    answer = hires("plan", *SMALL, "parallel=sp+lp", "parallel.tiles=[1,2]")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[:3] == ["placement (ranks)", "  stage 0   stage 1", "  [ 0 1 ]   [ 2 ]"]
    assert "  stage 0  F0 .  .  B0" in lines
    assert any(line.split()[:1] == ["halo"] for line in lines)
    assert "deadlock-free" in lines[-1]
    assert not Path("results").exists()


def test_json_is_what_plan_json_holds(hires):
    facts = json.loads(hires("plan", *SMALL, "parallel=sp", "--json").out)
    assert facts["world"] == 2
    assert Plan.from_dict(facts).to_dict() == facts


def test_infeasible_plan_is_shown_with_all_findings_and_exits_3(hires):
    answer = hires("plan", *SMALL, "parallel=pp", "parallel.microbatches=3")
    assert answer.code == 3
    assert answer.out.startswith("findings\n  error: batch=4 does not divide")
    assert "parallel.microbatches=2" in answer.out
