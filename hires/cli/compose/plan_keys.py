"""Selects the keys of a config that decide its plan; runs that differ in others share it."""

from __future__ import annotations

from typing import Any

from hires.core.config.run_config import RunConfig, to_dict

NEVER = (
    "campaign",
    "results",
    "steps",
    "measure",
    "checkpoint",
    "task.lr",
    "comm.timeout_s",
    "launcher.port",
    "data.path",
    "data.classes",
    "data.length",
    "data.fit",
    "data.shuffle",
)
"""Keys that change neither the network, nor the plan, nor its memory. What is not named here may:
a new key costs time until it is thought about, and no wrong answer. Of ``data.classes`` the config
holds what follows, ``model.classes``."""


def deciding(config: RunConfig) -> dict[str, Any]:
    """Returns a config as plain values without the keys that do not decide its plan."""
    values = to_dict(config)
    for key in NEVER:
        *groups, last = key.split(".")
        inner = values
        for group in groups:
            inner = inner[group]
        del inner[last]
    if config.model.name != "custom":  # a user's function may draw what it builds
        del values["seed"]
    return values
