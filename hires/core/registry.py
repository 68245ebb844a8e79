"""Registers implementations under the names that a config may use, and answers to a typo."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from hires.core.errors import ConfigError

T = TypeVar("T")

Named = Callable[..., Any] | str
"""A function or class, or where it is, as ``module:name``: that may import what the entry of a
registry must not, as torch."""


class Registry(Generic[T]):
    """Named choices of one kind, in order of registration.

    ``packages`` are those whose modules register items: all are imported at the first question.
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind, self._packages = kind, packages
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
        return self._scanned().get(name)

    def __getitem__(self, name: str) -> T:
        """Returns the item of that name; raises ConfigError, which offers the nearest names."""
        if name not in self._scanned():
            raise ConfigError(f"unknown {self.kind} {name!r}; {offer(name, self)}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._scanned()

    def __iter__(self) -> Iterator[str]:
        return iter(self._scanned())

    def sentences(self) -> dict[str, str]:
        """Returns the first line that each item says of itself, by its name."""
        return {
            name: (one.__doc__ or "").partition("\n")[0] for name, one in self._scanned().items()
        }

    def _scanned(self) -> dict[str, T]:
        packages, self._packages = self._packages, ()
        for package in packages:
            for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
                importlib.import_module(f"{package}.{found.name}")
        return self._items


@functools.cache
def imported(named: Named | None) -> Any:
    """Returns a function or class, or None; imports the module that it is in."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known words that look like ``word``, the most similar first.

    Upper and lower case are the same, and so are ``-`` and ``_``.
    """
    word = word.lower().replace("-", "_")
    by_shape = {name.lower().replace("-", "_"): name for name in known}
    hits = difflib.get_close_matches(word, list(by_shape), n=3, cutoff=0.6)
    likeness = {hit: difflib.SequenceMatcher(None, hit, word).ratio() for hit in hits}
    return [by_shape[hit] for hit in hits if likeness[hit] > max(likeness.values()) - 0.12]


def offer(word: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: what was meant, or else every choice there is.

    >>> offer("paralel", ["parallel", "model"])
    'did you mean parallel?'
    >>> offer("xyz", ["a", "b"])
    'choose one of a, b'
    >>> offer("xyz", [])
    'there are none'
    """
    names = list(known)
    if not names:
        return "there are none"
    hits = nearest(word, names)
    return f"did you mean {' or '.join(hits)}?" if hits else f"choose one of {', '.join(names)}"
