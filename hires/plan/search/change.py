"""Changes some keys of a config, and writes them as a user types them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """Keys of a config that take other values."""

    keys: dict[str, Any]
    """By dotted name, as ``parallel.stages``."""

    @property
    def text(self) -> str:
        """The overrides as a user types them."""
        return " ".join(f"{key}={written(value)}" for key, value in self.keys.items())

    def apply(self, config: RunConfig) -> RunConfig | None:
        """Returns the changed config, or None if its values make no sense together."""
        try:
            return self.applied(config)
        except ConfigError:
            return None

    def applied(self, config: RunConfig) -> RunConfig:
        """Returns the changed config; ConfigError: its values make no sense together."""
        changed: RunConfig = _replaced(config, self.keys)
        return changed


def written(value: Any) -> str:
    """Returns a value as a user types it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).replace(" ", "")


def _replaced(section: Any, keys: dict[str, Any]) -> Any:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        group, _, name = key.partition(".")
        if name:
            groups.setdefault(group, {})[name] = value
    values = {key: value for key, value in keys.items() if "." not in key}
    values |= {group: _replaced(getattr(section, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(section, **values)
