"""The examples of docs/own-loop.md, as their text."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hires
from hires.core.ranks.world import World
from tests.helpers.shard_jobs import torch_world

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


def small_network() -> nn.Module:
    """Returns two convolutions of float64, the same on every rank."""
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    return nn.Sequential(*layers).double()


def large_batches() -> list[tuple[Tensor, Tensor]]:
    """Returns two batches for the docs' engine, an eighth as high and wide."""
    images = torch.randn(2, 8, 3, 64, 64, generator=torch.Generator().manual_seed(5)).double()
    return [(one, (one[:, 0] > 0).long()) for one in images]


def documented_engine(world: World) -> Any:
    """Returns the last loss of the docs' engine, and the parameters of this rank."""
    names = {"hires": hires, "model": small_network(), "batches": large_batches()}
    with torch_world(world):
        exec(example("hires.Engine").replace("512", "64"), names)
        engine: Any = names["engine"]
        own = {name: one.detach().numpy().copy() for name, one in engine.parameters.items()}
    return names["loss"], own


def plain_steps_of_documented_engine() -> Any:
    """Returns the same of plain torch, which accumulates the gradients of four microbatches."""
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9, weight_decay=1e-4)
    for images, target in large_batches():
        optimizer.zero_grad()
        losses = []
        for x, y in zip(images.chunk(4), target.chunk(4), strict=True):
            loss = functional.cross_entropy(model(x), y) / 4
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return sum(losses), {name: one.detach().numpy() for name, one in model.named_parameters()}
