"""Names runs: a folder is ``<slug>-<hash8>``, and two runs with one name are the same run.

The slug is for people, the hash decides. It is of the resolved config without the keys that change
nothing about what is computed or measured, and of the contents that the config names: the source of
a network of the user's, and the images of a folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hires.core.config.launcher_config import HERE
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError

SCHEMA = 1
"""Version of what a run folder holds; it is part of the hash, so versions never share a folder."""

COSMETIC = (
    "campaign",
    "results",
    "launcher.port",
    "launcher.max_ranks",
    "launcher.account",
    "launcher.qos",
    "launcher.minutes",
    "launcher.pack",
    "launcher.signal_s",
    "launcher.requeues",
    "launcher.other_code",
    "launcher.interface",
    "launcher.mpirun",
    "launcher.mpi_options",
    "launcher.hosts",
    "comm.timeout_s",
    "comm.log",
    "comm.check",
    "comm.table",
    "weights",
    "quant.scales",
    "memory.limit",
    "data.max_pixels",
    "measure.tensorboard",
    "data.names",
    "checkpoint.every",
    "checkpoint.at_end",
    "checkpoint.keep",
    "checkpoint.continues",
)
"""Keys that decide where a run is kept, or how and whether it is started, not what it computes. So
does ``checkpoint.resume``, unless it names another run, whose parameters this one begins with. Of
``comm.table``, ``weights`` and ``quant.scales`` the contents count, wherever the files lie."""

LATER: dict[str, Any] = {
    "ranks": None,
    "parallel.objective": "images_per_s",
    "cluster.tflop_per_s": {},
    "cluster.memory_gb_per_s": None,
    "cluster.link_gb_per_s": None,
    "cluster.network_gb_per_s": None,
    "cluster.latency_us": None,
    "model.inputs": None,
    "model.output": None,
    "model.head": "pool",
    "launcher.bind": "auto",
    "launcher.mpi": None,
    "launcher.srun_mpi": None,
    "parallel.gather": "auto",
    "precision.weights": "auto",
    "precision.loss_scale": "dynamic",
    "precision.scale_interval": 2000,
    "comm.dtype": "value",
    "comm.joint_norms": True,
    "task.optimizer.shard": False,
    "task.optimizer.exchange": "auto",
    "optimizer.name": "sgd",
    "optimizer.scale_lr": False,
    "optimizer.clip_norm": None,
    "optimizer.ema": None,
    "optimizer.nesterov": False,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "epochs": None,
    "loss.weights": None,
    "loss.label_smoothing": 0.0,
    "loss.ignore_index": None,
    "loss.smooth": 1.0,
    "loss.target": None,
    "loss.targets": "classes",
    "lr_schedule.name": "constant",
    "lr_schedule.warmup": 0,
    "lr_schedule.warmup_begin": 1 / 3,
    "lr_schedule.step_size": 30,
    "lr_schedule.gamma": 0.1,
    "lr_schedule.steps": None,
    "lr_schedule.final": 0.0,
    "lr_schedule.rise": 0.3,
    "lr_schedule.first_divisor": 25.0,
    "lr_schedule.last_divisor": 1e4,
    "device": "cpu",
    "comm.visible": "own",
    "comm.granularity": "fine",
    "comm.backends": [],
    "engine.compile": "off",
    "engine.fuse": "auto",
    "comm.options": {},
    "predict.reduce": "argmax",
    "predict.table": "csv",
    "predict.format": "tiff",
    "augment.flip": "none",
    "augment.rotate": False,
    "augment.crop": 1.0,
    "augment.shift": 0,
    "augment.brightness": 0.0,
    "augment.contrast": 0.0,
    "augment.saturation": 0.0,
    "augment.hue": 0.0,
    "validate.every": None,
    "validate.metric": "auto",
    "validate.patience": None,
    "validate.min_delta": 0.0,
    "validate.weights": "trained",
    "data.split": "all",
    "data.images": "images/*",
    "data.masks": "masks/*",
    "data.ignore": None,
    "data.normalize": "white",
    "data.mean": None,
    "data.std": None,
    "data.validation": 0.1,
    "data.split_seed": 0,
    "data.split_file": None,
    "data.test": 0.0,
    "data.balance": False,
    "data.level": 0,
    "data.cut": "patches",
    "data.region": None,
    "data.stride": None,
    "data.tissue": 0.5,
    "data.labels": None,
    "data.outside": None,
    "data.groups": {},
    "data.detections": False,
    "data.order": None,
    "quant.linear": "static",
    "quant.observer": "entropy",
    "quant.percentile": 99.99,
    "quant.images": 256,
    "quant.calibration": "data",
    "quant.data": {},
    "quant.keep": [],
    "quant.auto": None,
}
"""Keys that came later, with the value that leaves the names of older runs as they are."""

SECTIONS = ("engine", "quant", "predict", "validate", "augment", "optimizer", "lr_schedule", "loss")
"""Sections that came later; names hold none that is empty without those keys."""

MOVED = {
    "optimizer.lr": "task.lr",
    "optimizer.momentum": "task.momentum",
    "optimizer.weight_decay": "task.weight_decay",
    "optimizer.shard": "task.optimizer.shard",
    "optimizer.exchange": "task.optimizer.exchange",
    "loss.name": "task.loss",
}
"""Keys that have moved, with their places in the names of older runs."""

_MAX_PART = 48


def model_label(model: ModelConfig) -> str:
    """Returns the network in one word, as ``resnet50``, ``preact_resnet110`` or ``custom:unet``."""
    sizes = {
        "resnet": f"{model.depth}",
        "preact_resnet": f"{9 * model.n + 2}",
        "mpi4dl_resnet": f"{9 * model.n + 2}",
        "amoebanet": f"{model.layers}_{model.filters}",
        "unet": f"{model.levels}_{model.width}_{model.upsample}",
        "edsr": f"{model.blocks}_{model.width}_x{model.scale}",
    }
    target = f":{model.target.rpartition(':')[2]}" if model.target else ""
    return model.name + sizes.get(model.name, target)


def run_name(config: RunConfig, digests: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the name of the run's folder, ``<slug>-<hash8>``, safe in a path.

    ``digests`` are those of the network's source and of the data, of runs that have them.
    """
    size, layout = f"{config.height}x{config.width}", config.parallel.name
    parts = (model_label(config.model), size, layout, config.precision.name)
    slug = "-".join(re.sub(r"[^A-Za-z0-9._+]+", "_", part)[:_MAX_PART] for part in parts)
    facts = [SCHEMA, identity(plain(config)), *([dict(digests)] if digests else [])]
    text = json.dumps(facts, sort_keys=True)
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a config, as plain values, without its cosmetic keys."""
    kept: dict[str, Any] = json.loads(json.dumps(values))
    for key in COSMETIC:
        _drop(kept, key)
    for key, before in MOVED.items():
        _move(kept, key, before)
    for key, default in LATER.items():
        _drop(kept, key, default)
    for section in SECTIONS:
        if not kept.get(section, True):
            del kept[section]
    _drop(kept, "task.optimizer", {})
    # Frozen configs hold what ``auto`` means; one that was never resolved counts as of a CPU.
    _drop(kept, "device", "auto")
    if isinstance(comm := kept.get("comm"), dict) and comm.get("backend") == "auto":
        comm["backend"] = "gloo"
    # Of a cluster its name: its other keys decide how a run is started, not what it computes.
    cluster = kept.pop("cluster", None)
    if isinstance(cluster, dict) and cluster.get("name", HERE) != HERE:
        kept["cluster"] = cluster["name"]
    saving = kept.get("checkpoint")
    if isinstance(saving, dict) and saving.get("resume", "auto") in ("auto", "never"):
        del kept["checkpoint"]  # all of it: names are as before there were checkpoints
    return kept


_ANY = object()


def _drop(values: dict[str, Any], key: str, value: Any = _ANY) -> None:
    """Removes a dotted key from plain values, if it is there and has that value."""
    *groups, last = key.split(".")
    inner: Any = values
    for group in groups:
        inner = inner.get(group)
        if not isinstance(inner, dict):
            return
    if value is _ANY or inner.get(last, _ANY) == value:
        inner.pop(last, None)


def _move(values: dict[str, Any], key: str, place: str) -> None:
    """Moves a dotted key of plain values, if it is there."""
    section, _, last = key.rpartition(".")
    if not isinstance(found := values.get(section), dict) or last not in found:
        return
    *groups, name = place.split(".")
    inner: Any = values
    for group in groups:
        inner = inner.setdefault(group, {}) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner[name] = found.pop(last)


def plain(config: RunConfig) -> dict[str, Any]:
    """Returns the config as values that JSON and YAML give back unchanged; raises ConfigError."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(to_dict(config)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model.args={config.model.args!r} must hold numbers, text, lists and keys only "
            f"({error})"
        ) from None
    return values
