"""Finds the known words that are nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns up to ``count`` known words that look like ``word``, the most similar first.

    Upper and lower case are the same, and so are ``-`` and ``_``.
    """
    by_shape = {_shape(name): name for name in known}
    hits = difflib.get_close_matches(_shape(word), list(by_shape), n=count, cutoff=0.6)
    best = _likeness(word, hits[0]) if hits else 0.0
    return [by_shape[hit] for hit in hits if _likeness(word, hit) > best - 0.12]


def offer(word: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: what was meant, or else every choice there is.

    >>> offer("paralel", ["parallel", "model"])
    'did you mean parallel?'
    >>> offer("xyz", ["a", "b"])
    'choose one of a, b'
    """
    names = list(known)
    hits = nearest(word, names)
    if hits:
        return f"did you mean {' or '.join(hits)}?"
    return f"choose one of {', '.join(names)}"


def _likeness(word: str, shape: str) -> float:
    return difflib.SequenceMatcher(None, shape, _shape(word)).ratio()


def _shape(word: str) -> str:
    return word.lower().replace("-", "_")
