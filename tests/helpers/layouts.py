"""Plans for tests, from the keys that a user would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict, to_dict
from tests.helpers.jobs import verify
from tests.helpers.ranks import run_ranks
from tests.helpers.traces import plan_of


def config_of(**keys: Any) -> RunConfig:
    """Returns a small fp64 config; ``parallel={"tiles": [2, 1]}`` and so on override it."""
    values: dict[str, Any] = {
        "image": [19, 22],
        "batch": 2,
        "steps": 3,
        "model": {"name": "preact_resnet", "depth": 11, "classes": 4},
        "data": {"classes": 4, "length": 16},
        "precision": {"name": "fp64"},
    }
    for key, value in keys.items():
        same = isinstance(value, dict) and value.get("name") in (
            None,
            values.get(key, {}).get("name"),
        )
        values[key] = {**values.get(key, {}), **value} if same else value
    return from_dict(values)


def verified(folder: Path, **keys: Any) -> dict[str, Any]:
    """Returns verify.json of a layout that ran on ranks."""
    config = config_of(**keys)
    plan = plan_of(config)
    assert plan.ok, plan.findings
    given = (to_dict(config), plan.to_dict(), str(folder))
    return run_ranks(verify, plan.world, *given)[0]


Given = tuple[str, dict[str, Any], dict[str, Any], str]
"""Name, config and plan of a layout, and the folder for its comparison."""


def given(name: str, folder: Path, config: RunConfig) -> Given:
    plan, place = plan_of(config), folder / name.replace("/", " ")
    assert plan.ok, plan.findings
    place.mkdir()
    return name, to_dict(config), plan.to_dict(), str(place)
