"""The examples of docs/own-loop.md, as their text."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from hires.core.ranks.world import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"


def script(word: str = "model.pt") -> str:
    """Returns the one script for torchrun that contains a word."""
    return _block("python", word)


def example(word: str) -> str:
    """Returns the one shorter example that contains a word."""
    return _block("py", word)


def _block(language: str, word: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [text] = [block for block in blocks if word in block]
    return str(text)


def run_script(world: World, text: str, folder: str) -> None:
    """Runs a script in a folder on a rank that torchrun would have started."""
    address = {"MASTER_ADDR": world.address, "MASTER_PORT": str(world.port)}
    os.environ.update(address, RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK="0")
    with contextlib.chdir(folder):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
