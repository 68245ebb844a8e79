"""Records which images a network was calibrated on, and which its float weights were trained with.

    "origin": {"calibration": {"image": [224, 224], "seed": 0, "data": {"name": "digits", ...}},
               "training": {the same keys, of the run that trained the weights},
               "weights": "/home/me/results/default/RUN/best"}

No number of the network depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import plain

CALIBRATION, TRAINING, WEIGHTS = "calibration", "training", "weights"
_OF_PIXELS = ("normalize", "mean", "std", "prefetch")
"""Keys of the data that choose no image, nor its class."""
_DEEPEST = 4
_LARGEST = 2.0**1000


def image_facts(config: RunConfig) -> dict[str, Any]:
    """Returns the keys of a config that decide which images its run reads, as plain values."""
    values = plain(config)
    data = {key: one for key, one in values["data"].items() if key not in _OF_PIXELS}
    if data["path"] is not None:  # the files may be read from another folder
        data["path"] = str(Path(data["path"]).expanduser().absolute())
    return {"image": [config.height, config.width], "seed": config.seed, "data": data}


def origin_config(origin: Mapping[str, Any], part: str) -> RunConfig | None:
    """Returns a config that reads the images of a part; None: there is none, or of another hires.

    ``part`` is :data:`CALIBRATION` or :data:`TRAINING`.
    """
    try:
        return from_dict(origin[part]) if part in origin else None
    except ConfigError:
        return None


def checked_origin(held: Any) -> dict[str, Any]:
    """Returns the origin in a file; ValueError: it is no object, or has a number out of bounds."""
    if not isinstance(held, dict):
        raise ValueError("origin is not an object of names")
    _check(held, _DEEPEST)
    return held


def _check(held: Any, depth: int) -> None:
    # Texts may be anything, as names of folders are.
    if isinstance(held, (int, float)) and not abs(held) <= _LARGEST:  # NaN, too
        raise ValueError(f"a number of the origin is {str(held)[:20]}")
    if isinstance(held, (dict, list)):
        if not depth:
            raise ValueError("origin has too many levels")
        for one in held.values() if isinstance(held, dict) else held:
            _check(one, depth - 1)
