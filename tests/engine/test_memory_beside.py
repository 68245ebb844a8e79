"""Is the memory of the backend shm a part of the prediction?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hires.engine.footprint import footprint
from hires.engine.memory_beside import backend_bytes
from hires.plan.memory import Room
from tests.helpers.layouts import config_of, plan_of


def planned(folder: Path, route: str, **parallel: Any) -> tuple[Any, Any]:
    """Returns a config and its plan, whose messages go through a whole backend."""
    sends = [] if route.count(":") else [{"operations": ["send"], "route": route}]
    table = {"format": 2, "rules": [*sends, {"operations": ["all_reduce"], "route": route}]}
    path = folder / "table.json"
    path.write_text(json.dumps({**table, "default": "gloo"}))
    keys: dict[str, Any] = {"batch": 6, "parallel": parallel, "comm": {"table": str(path)}}
    keys["model"] = {"name": "resnet", "depth": 18, "classes": 9}
    config = config_of(**keys, image=[64, 64], precision={"name": "fp32"})
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return config, plan


def test_memory_of_backends_is_a_part_that_a_node_counts_once(tmp_path: Path):
    config, plan = planned(tmp_path, "shm", replicas=3)
    plan = replace(plan, memory=[one.to_dict() for one in footprint(config, plan)])
    [one] = {entry["shm_bytes"] for entry in plan.memory}
    assert one == backend_bytes(plan, 0) > 2**20
    apart = [entry | {"shm_bytes": 0} for entry in plan.memory]
    room = Room(None, None)
    whole = room.per_node(plan)[0].bytes
    plan = replace(plan, memory=apart)
    assert room.per_node(plan)[0].bytes - whole == 3 * one // 2
    assert backend_bytes(planned(tmp_path, "gloo", replicas=3)[1], 0) == 0
