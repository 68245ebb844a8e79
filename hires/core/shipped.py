"""Finds the files of ``conf/`` and ``launch/``, which ship with hires, and names its extras."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hires.core.errors import ConfigError


def shipped(name: str) -> Path:
    """Returns a file of ``conf/`` or ``launch/``; raises ConfigError if it is missing.

    They are inside the package where hires is installed, and beside it in a checkout.
    """
    package, _, rest = name.partition("/")
    spec = find_spec(f"hires.{package}")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    places.append(Path(__file__).resolve().parents[2] / package)
    for place in places:
        if (place / rest).is_file():
            return (place / rest).resolve()
    looked = ", ".join(map(str, places))
    raise ConfigError(f"{name} is missing (looked in {looked}); install hires again")


def adding(extra: str) -> str:
    """Returns the command that adds an extra; the public index has another project named hires."""
    return f"in the checkout of hires: pip install -e '.[{extra}]' -c constraints.txt"
