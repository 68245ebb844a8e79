"""How are single values of a config checked?"""

from __future__ import annotations

from hires.core.errors import ConfigError


def at_least(key: str, value: int, low: int) -> None:
    """Refuses a number below ``low``."""
    if value < low:
        raise ConfigError(f"{key}={value} must be at least {low}")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a name that is not among the choices."""
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}")
