"""Formats numbers, lists of names and rows of text for people, and parses sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

GIB = 2**30
MIB = 2**20

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FORMULA = re.compile(r"[=+@\t]|-(?!$|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?$| / [\d,]+$| / -$)")
"""How a text begins that a spreadsheet computes; a number below 0 is no formula, nor are places,
as ``- / 1,0``."""


def listed(words: Sequence[str], most: int | None = 3, separator: str = ", ") -> str:
    """Returns the first words of a list, all with None, and how many more there are.

    >>> listed("abcde")
    'a, b, c and 2 more'
    """
    more = 0 if most is None else max(0, len(words) - most)
    shown = separator.join(words if most is None else words[:most])
    return f"{shown}{separator.rstrip(' ,')} and {more} more" if more else shown


def gib(num_bytes: float) -> str:
    """Returns bytes in GiB, as ``1.25 GiB``."""
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes < 100 * GIB else f"{num_bytes / GIB:.0f} GiB"


def size(num_bytes: float) -> str:
    """Returns bytes in the unit that suits them, as ``512 B``, ``1.5 KiB`` or ``97.8 MiB``."""
    value = float(num_bytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def parse_size(value: Any) -> int | None:
    """Returns the bytes that a number or a text as ``4GiB``, ``800 MB`` or ``4096`` means.

    ``k`` to ``P`` count in thousands, ``Ki`` to ``Pi`` in 1024s. What is no size above 0 is None.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        return None
    number, letter, binary = match.groups()
    power = "kmgtp".index(letter.lower()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power) or None


def seconds(value_s: float) -> str:
    """Returns a duration, as ``310 us``, ``41.5 ms``, ``3.21 s`` or ``4 min 10 s``."""
    if value_s < 0:
        return "-" + seconds(-value_s)
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 60:
        return f"{value_s:.2f} s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def rough(value_s: float) -> str:
    """Returns how long something may take, in whole seconds, as ``40 s`` or ``4 min 10 s``."""
    return f"{value_s:.0f} s" if value_s < 59.5 else seconds(value_s)


def count(value: float) -> str:
    """Returns a large count, as ``832``, ``25.6 M`` or ``4.1 G``."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {letter}"
    return f"{value:g}"


def aligned(rows: Sequence[Sequence[str]], sides: str, gap: str = "  ") -> list[str]:
    """Returns one line a row, in columns of equal width; ``sides`` has ``l`` or ``r`` for each.

    >>> aligned([("stage", "layers"), ("0", "12"), ("1", "7")], "lr")
    ['stage  layers', '0          12', '1           7']
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]


def spreadsheet_text(text: str) -> str:
    """Returns a text for a CSV file; one that a spreadsheet would compute gets an apostrophe."""
    return f"'{text}" if _FORMULA.match(text) else text
