"""Changes the keys of a repeated run that leave its point as it is."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence

import yaml

from hires.cli.compose.config_keys import keys
from hires.cli.compose.nearest import offer
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import COSMETIC, identity, plain

_PLACES = ("campaign", "results")
"""Cosmetic keys that say where a run is kept."""


def with_keys(config: RunConfig, changes: Sequence[str], command: str) -> RunConfig:
    """Returns a config with some keys changed.

    Args:
        config: of a run that exists.
        changes: ``key=value`` each.
        command: the command line that made the run.

    Raises:
        ConfigError: a key is unknown, its value has the wrong type, or it makes another point.
    """
    values = plain(config)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in keys():
            raise ConfigError(f"--set {change}: there is no key {key!r}; {offer(key, free_keys())}")
        if key in _PLACES:
            raise ConfigError(
                f"--set {change} would keep the run elsewhere; run it there with "
                f"`{command} {shlex.quote(change)}`"
            )
        *sections, last = key.split(".")
        section = functools.reduce(dict.__getitem__, sections, values)
        try:
            section[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(
                f"--set {change}: the value cannot be read; put text in quotes"
            ) from None
    changed = from_dict(values)
    if identity(plain(changed)) != identity(plain(config)):
        other = [c for c in changes if c.partition("=")[0] not in free_keys()]
        raise ConfigError(
            f"--set {' '.join(other)} makes another point, which is a run of its own: "
            f"`{command} {shlex.join(other)}`; a retry may change {', '.join(free_keys())}"
        )
    return changed


def free_keys() -> list[str]:
    """Returns the keys that a retry may change."""
    return [key for key in COSMETIC if key not in _PLACES]
