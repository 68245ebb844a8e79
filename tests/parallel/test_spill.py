"""Activations on a disk change no bit of a training, and leave nothing there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.core.errors import RunError
from hires.engine.build import build_rank
from hires.engine.footprint import footprint
from hires.engine.rank_engine import RankEngine
from hires.parallel import spill
from tests.helpers.layouts import config_of
from tests.helpers.traces import plan_of

UNET = {"name": "unet", "levels": 3, "width": 4, "classes": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"parallel": {"microbatches": 2}},
    "tiles": {"parallel": {"tiles": [2, 2], "resident": 4}, "model": UNET, "image": [37, 41]},
    "again": {"parallel": {"tiles": [3, 1], "resident": 3}, "memory": {"checkpoint": "block"}},
    "bf16": {"parallel": {"tiles": [3, 1], "resident": 3}, "precision": {"name": "bf16"}},
    "stages": {
        "batch": 8,
        "parallel": {"stages": 3, "microbatches": 4, "schedule": "1f1b", "resident": 3},
    },
}


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SMALLEST_BYTES", 1)


def trained(keys: dict[str, Any], steps: int = 2, folder: Path | None = None) -> RankEngine:
    """Returns what a process has run, with or without a folder for activations."""
    memory = {**keys.get("memory", {}), "spill": None if folder is None else str(folder)}
    config = config_of(**{**keys, "memory": memory, "data": {"prefetch": 0}})
    engine = build_rank(config, plan_of(config), 0, steps)
    for step in range(steps):
        engine.executor.step(engine.loaders, number=step)
        if folder is not None:
            assert not [*folder.iterdir()]
    return engine


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_has_the_bits_that_it_has_in_memory(name: str, tmp_path: Path):
    one = trained(LAYOUTS[name])
    other = trained(LAYOUTS[name], folder=tmp_path / "new" / "folder")
    assert other.spill is not None
    assert other.spill.written_bytes > 0
    assert [n for n, t in one.tensors.items() if not torch.equal(t, other.tensors[n])] == []
    other.close()


@pytest.mark.parametrize("name", ["single", "tiles", "again"])
def test_disk_holds_what_was_predicted_in_every_step(name: str, tmp_path: Path):
    first, third = (trained(LAYOUTS[name], steps, tmp_path).spill for steps in (1, 3))
    assert first is not None
    assert third is not None
    assert third.file_bytes == first.file_bytes
    keys = {**LAYOUTS[name], "data": {"prefetch": 0}}
    config = config_of(**{**keys, "memory": {**keys.get("memory", {}), "spill": str(tmp_path)}})
    [memory] = footprint(config, plan_of(config))
    assert memory.spill_bytes == first.file_bytes


def test_memory_without_what_is_spilled(tmp_path: Path):
    keys = {"image": [96, 96], "memory": {"checkpoint": "none"}}
    [kept] = footprint(config := config_of(**keys), plan_of(config))
    config = config_of(**{**keys, "memory": {"spill": str(tmp_path)}})
    [spilled] = footprint(config, plan_of(config))
    assert spilled.activations_bytes < kept.activations_bytes / 2 < spilled.spill_bytes


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_disk_that_fails_ends_the_step_with_its_cause(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(RunError, match=r"memory.spill=.*: No space left on device; name a folder"):
        trained(LAYOUTS["tiles"], folder=tmp_path)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"memory.spill=.*file.*cannot keep activations"):
        trained(LAYOUTS["single"], folder=tmp_path / "file")
