"""Tells which keys of a config decide its plan: points that differ only in others have one plan."""

from __future__ import annotations

from typing import Any

from hires.core.config.run_config import RunConfig, to_dict

UNRELATED = (
    "campaign", "results", "steps", "measure", "checkpoint", "weights", "predict", "optimizer.lr",
    "optimizer.scale_lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.eps",
    "lr_schedule", "comm.timeout_s", "comm.visible", "launcher.port", "data.path", "data.classes",
    "data.length", "data.fit", "data.shuffle", "data.split", "data.validation", "data.split_seed",
    "augment", "data.normalize", "data.mean", "data.std", "data.images", "data.masks",
    "data.split_file", "data.test", "data.balance", "data.level", "data.region", "data.stride",
    "data.tissue", "data.labels", "data.outside", "data.cut", "data.names",
    "data.groups", "data.detections",
)  # fmt: skip
"""Keys that change neither the network, nor the plan, nor its memory. A new key that is not
named here costs time and gives no wrong answer. ``model.classes`` is what follows of
``data.classes``."""


def deciding(config: RunConfig) -> dict[str, Any]:
    """Returns a config as plain values without the keys that do not decide its plan."""
    values = to_dict(config)
    for key in UNRELATED:
        section, _, name = key.rpartition(".")
        del (values[section] if section else values)[name]
    # A run of fewer steps than microbatches are read ahead holds fewer of them.
    values["ahead"] = min(config.steps, config.data.prefetch + 1)
    if config.model.name != "custom":  # a user's function may draw what it builds
        del values["seed"]
    return values
