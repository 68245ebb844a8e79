"""Names runs: a folder is ``<slug>-<hash8>``, and two runs with one name are the same run.

The slug is for people, the hash decides. It is of the keys that differ from their defaults, without
those that change nothing about what is computed or measured, and of the contents that the config
names: the source of a network of the user's, and the images of a folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hires.core.config.fields import keys_without
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError

SCHEMA = 4
"""Version of what a run folder holds; it is part of the hash, so versions never share a folder."""

COSMETIC = tuple(keys_without(RunConfig, "identity"))
"""Keys that decide where a run is kept, or how and whether it is started, not what it computes. Of
``comm.table``, ``weights`` and ``quant.scales`` the contents count, wherever the files lie."""

_MAX_PART = 48
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./:+@-]*")
_OTHER_VALUES = ("null", "true", "false", "nan", "inf")


def model_label(model: ModelConfig) -> str:
    """Returns the network in one word, as ``resnet50``, ``preact_resnet110`` or ``custom:unet``."""
    sizes = {
        "resnet": f"{model.num_layers}",
        "preact_resnet": f"{model.num_layers}",
        "mpi4dl_resnet": f"{model.num_layers}",
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
    """Returns the keys of a config, as plain values, that decide what is computed and measured.

    Those are left out that are cosmetic or have their default, so a new key renames no run. Of
    ``launcher.hosts`` their number counts.
    """
    kept = {}
    for name, value in values.items():
        default = _defaults().get(name)
        if isinstance(default, dict) and isinstance(value, dict):
            value = {
                key: one
                for key, one in value.items()
                if f"{name}.{key}" not in COSMETIC and (key, one) not in default.items()
            }
            default = {}
        if name not in COSMETIC and value != default:
            kept[name] = value
    launcher = values.get("launcher")
    hosts = launcher.get("hosts") if isinstance(launcher, dict) else None
    if isinstance(hosts, list) and len(hosts) > 1:  # whichever they are, as the nodes of a job
        kept["launcher"] = {**kept.get("launcher", {}), "hosts": len(hosts)}
    if kept.get("checkpoint") == {"resume": "never"}:
        del kept["checkpoint"]  # only another run, whose parameters it begins with, counts
    return kept


@functools.cache
def _defaults() -> dict[str, Any]:
    return plain(RunConfig())


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


def overrides(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that make one config out of another."""
    old, new = leaves(before), leaves(after)
    changed = [key for key in new if key not in old or old[key] != new[key]]
    return [f"{key}={_word(new[key])}" for key in changed] + [f"~{k}" for k in old if k not in new]


def leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values, lists among them, by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = leaves(value) if isinstance(value, dict) else {}
        flat |= {f"{key}.{name}": one for name, one in inner.items()} or {str(key): value}
    return flat


def _word(value: Any) -> str:
    is_text = isinstance(value, str)
    if is_text and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _OTHER_VALUES:
        return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
