"""Names that the tensors of a file get, so that they are those of a network.

module.backbone.layer1.0.conv1.weight    of the file
backbone.layer1.0.conv1.weight    without what a wrapper put before all names
layer1.0.conv1.weight    renamed by `backbone=`
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hires.core.errors import ConfigError


@dataclass(frozen=True)
class NameRules:
    """What `hires weights import` does to names; a beginning ends at a dot of the name."""

    renames: Sequence[tuple[str, str]] = ()
    """Beginnings and what replaces them; the first that fits a name counts."""
    without: Sequence[str] = ()
    """Beginnings of names that are left out."""

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the name of each tensor that stays, by its name in the file.

        ConfigError: a rule fits no name, or two tensors would have one name.
        """
        every, found, owners = [*names], dict[str, str](), dict[str, str]()
        self._refuse_idle(every)
        for name in every:
            if any(_begins(name, one) for one in self.without):
                continue
            new = next(
                (_replaced(name, *rule) for rule in self.renames if _begins(name, rule[0])), name
            )
            if new in owners:
                raise ConfigError(
                    f"{owners[new]} and {name} would both be {new}; leave one out with --without"
                )
            found[name], owners[new] = new, name
        return found

    def _refuse_idle(self, names: Collection[str]) -> None:
        rules = [("--rename", old) for old, _ in self.renames]
        rules += [("--without", beginning) for beginning in self.without]
        for option, beginning in rules:
            if not any(_begins(name, beginning) for name in names):
                raise ConfigError(
                    f"{option} {beginning}: no name begins with it; `hires weights show FILE` "
                    f"lists the names"
                )


def of_first_values(beginnings: Sequence[str], needed: Mapping[str, object]) -> list[str]:
    """Returns the names of a network's tensors that begin in one of some ways.

    ConfigError: none begins so.
    """
    for beginning in beginnings:
        if not any(_begins(name, beginning) for name in needed):
            raise ConfigError(f"--fresh {beginning}: the network has no tensor of this name")
    return [name for name in needed if any(_begins(name, one) for one in beginnings)]


def _begins(name: str, beginning: str) -> bool:
    beginning = beginning.removesuffix(".")
    return not beginning or name == beginning or name.startswith(f"{beginning}.")


def _replaced(name: str, old: str, new: str) -> str:
    rest = name.removeprefix(old.removesuffix(".")).removeprefix(".") if old else name
    return ".".join(part for part in (new.removesuffix("."), rest) if part)
