"""Registers implementations under the names that a config may use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hires.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named choices of one kind; the error for an unknown name offers the nearest ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that files its function or class under ``name``."""

        def file(item: T) -> T:
            assert name not in self._items, f"{self.kind} {name} is registered twice"
            self._items[name] = item
            return item

        return file

    def get(self, name: str) -> T | None:
        """Returns the item of that name, or None."""
        return self._items.get(name)

    def __getitem__(self, name: str) -> T:
        """Returns the item of that name; raises ConfigError, which offers the nearest names."""
        if name not in self._items:
            near = difflib.get_close_matches(name, self._items, 3, 0.5) or list(self)
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of {', '.join(near)}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        """Whether an item of that name is registered."""
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        """Yields the names in order of registration."""
        return iter(self._items)
