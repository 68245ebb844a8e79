"""Filters the points of a sweep by ``--where``, an expression over config keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hires.cli.compose.choices import keys
from hires.cli.compose.expression import Expression
from hires.core.config.run_config import RunConfig

DERIVED: dict[str, Callable[[RunConfig], int]] = {
    "height": lambda config: config.height,
    "width": lambda config: config.width,
    "ranks": lambda config: config.parallel.num_ranks,
}
"""What an expression may name besides keys and groups."""


class Where(Expression):
    """An expression that is true or false of a point."""

    def __init__(self, text: str, groups: Iterable[str]) -> None:
        """Takes the expression and the groups of the config.

        Raises:
            ConfigError: it is no expression, holds what is not allowed, or names an unknown key.
        """
        self._groups = set(groups)
        super().__init__(text, {*keys(), *self._groups, *DERIVED, "model.args."})

    def keeps(self, config: RunConfig, choices: dict[str, str]) -> bool:
        """Returns whether the expression is true of a point.

        Args:
            config: of the point.
            choices: group -> choice of the point.

        Raises:
            ConfigError: it has no value here, as with a number compared to text, or is no truth.
        """
        return self.truth(lambda name: self._looked_up(name, config, choices))

    def _looked_up(self, name: str, config: RunConfig, choices: dict[str, str]) -> Any:
        if name in DERIVED:
            return DERIVED[name](config)
        if name in self._groups:
            return choices.get(name)
        if name == "image":
            if config.height != config.width:
                size = f"[{config.height},{config.width}]"
                raise self.wrong(f"needs one number where image={size}; write height or width")
            return config.height
        value: Any = config
        for part in name.split("."):
            if isinstance(value, dict) and part not in value:
                raise self.wrong(f"names {name}, which a point does not have")
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value
