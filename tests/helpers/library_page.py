"""The examples of docs/library.md, as their text."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "library.md"


def script() -> str:
    """Returns the script for torchrun."""
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def example(word: str) -> str:
    """Returns the one shorter example that contains a word."""
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [text] = [block for block in blocks if word in block]
    return str(text)
