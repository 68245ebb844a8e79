"""A checkpoint of which anything differs from what was written is named, and never used."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hires import comm
from hires.core.errors import PREEMPTED
from hires.core.ranks.world import World
from hires.core.store import checkpoints, file_names, records
from hires.core.store.attempts import Attempt
from hires.engine.resume_point import resume_point
from hires.plan.plan import Plan
from tests.helpers.file_faults import STRUCTURAL
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, make, numbered

pytestmark = pytest.mark.dist

KEYS = {
    "model": {"name": "preact_resnet", "depth": 11},
    "precision": {"name": "fp32"},
    "optimizer": {"name": "adamw", "ema": 0.75},
    "steps": 6,
    "checkpoint": {"every": 2},
}
Harm = Callable[[Path], object]


def flip(file: str, place: int) -> Harm:
    """Changes one bit of a file, at a place from its beginning or its end."""

    def harm(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[place % len(data)] ^= 1 << (abs(place) % 8)
        (folder / file).write_bytes(data)

    return harm


def replace(file: str, old: bytes, new: bytes) -> Harm:
    """Replaces the first of some bytes, as in a header."""

    def harm(folder: Path) -> None:
        data = (folder / file).read_bytes()
        assert old in data
        (folder / file).write_bytes(data.replace(old, new, 1))

    return harm


def swap(first: str, second: str) -> Harm:
    """Gives two files the name of each other."""

    def harm(folder: Path) -> None:
        data = (folder / first).read_bytes()
        (folder / first).write_bytes((folder / second).read_bytes())
        (folder / second).write_bytes(data)

    return harm


def left_out(*names: str) -> Harm:
    """Leaves files out of the manifest."""

    def harm(folder: Path) -> None:
        values = json.loads((folder / checkpoints.MANIFEST).read_text())
        for name in names:
            del values["values"]["files"][name]
        (folder / checkpoints.MANIFEST).write_text(json.dumps(values))

    return harm


KINDS = ("stage00", "exp_avg00", "exp_avg_sq00", "ema00")
STAGE, MEAN, SQUARES, EMA = TENSORS = [f"{kind}.safetensors" for kind in KINDS]
FILES = (*TENSORS, checkpoints.MANIFEST)
PLACES = random.Random(7)
HARMS: dict[str, Harm] = {
    f"{file} bit {place}": flip(file, place)
    for file in FILES
    for place in (0, PLACES.randrange(8, 400), -1)
}
HARMS |= {
    "name of a mean": replace(MEAN, b'"conv1.weight"', b'"conv1.weighu"'),
    "name of a weight": replace(STAGE, b'"conv1.weight"', b'"conv1.weighu"'),
    "type": replace(STAGE, b'"dtype":"F32"', b'"dtype":"I32"'),
    "swapped": swap(MEAN, SQUARES),
    "step": replace(checkpoints.MANIFEST, b'"step": 4', b'"step": 5'),
    "left out": left_out(MEAN),
    "emptied": left_out(*TENSORS),
}
HARMS |= {
    f"{file} {name}": lambda folder, file=file, harm=harm: harm(folder / file)
    for file in (STAGE, checkpoints.MANIFEST)
    for name, harm in STRUCTURAL.items()
}


def begins_of(world: World, folders: list[str]) -> list[str | None]:
    """Returns the checkpoint at which the second attempt of each of some folders begins."""
    comm.init(world=world, timeout_s=60)
    found, own = [], dataclasses.replace(world, attempt=1)
    for folder in folders:
        plan = Plan.from_dict(records.read_plan(folder))
        begin = resume_point(Path(folder), records.read_config(folder), plan, own)
        found.append(begin.checkpoint.name if begin.checkpoint else None)
    comm.shutdown()
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved after steps 2 and 4, and stopped there."""
    run = make(tmp_path_factory.mktemp("damaged"), **KEYS)
    assert attempt(run, stop_at=4) == [PREEMPTED]
    (file_names.attempt_dir(run, 1) / "logs").mkdir(parents=True)
    assert {path.name for path in checkpoints.place(run, 4).iterdir()} == {*FILES}
    return run


def damage(run: Path) -> list[str]:
    events = Attempt(run, 1).events
    return [event["text"] for event in events if event["event"] == "checkpoint_damaged"]


def test_every_damage_of_every_file_is_named_and_the_checkpoint_before_is_used(stopped, tmp_path):
    copies = {name: shutil.copytree(stopped, tmp_path / name / "run") for name in HARMS}
    for name, harm in HARMS.items():
        harm(checkpoints.place(copies[name], 4))
    [begins] = run_ranks(begins_of, 1, [str(path) for path in copies.values()])
    assert dict(zip(copies, begins, strict=True)) == dict.fromkeys(copies, "step000002")
    for name, run in copies.items():
        texts = damage(run)
        assert texts, name
        assert all("step000004" in text and "step000002 is used" in text for text in texts), name
        assert not any("\x1b" in text for text in texts), name


def test_each_rank_verifies_its_part_of_a_divided_state(tmp_path):
    keys = {**KEYS, "parallel": {"replicas": 2}, "optimizer": {"name": "adamw", "shard": True}}
    run = make(tmp_path / "whole", **keys)
    assert attempt(run, stop_at=4) == [PREEMPTED] * 2
    copies = [shutil.copytree(run, tmp_path / str(rank) / "run") for rank in range(2)]
    for rank, copy in enumerate(copies):
        (file_names.attempt_dir(copy, 1) / "logs").mkdir(parents=True)
        flip(f"exp_avg00.00{rank}.safetensors", -1)(checkpoints.place(copy, 4))
    begins = run_ranks(begins_of, 2, [str(copy) for copy in copies])
    assert begins == [["step000002"] * 2] * 2


def test_run_without_a_whole_checkpoint_says_that_it_begins_anew(stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for step in (2, 4):
        flip(STAGE, 20)(checkpoints.place(run, step))
    assert run_ranks(begins_of, 1, [str(run)]) == [[None]]
    texts = damage(run)
    assert [text for text in texts if "step000002" in text and "begins at step 0" in text]
    assert not any("is used" in text for text in texts)


def test_damaged_checkpoint_does_not_count_among_those_that_are_kept(stopped, tmp_path):
    # It has the latest step, so with two to keep, the whole one before would go.
    run = shutil.copytree(stopped, tmp_path / "run")
    flip(STAGE, -3)(checkpoints.place(run, 4))
    assert run_ranks(numbered, 1, str(run), 1, 3) == [PREEMPTED]
    there = {one.step: one for one in checkpoints.whole_checkpoints(run)[0]}
    assert sorted(there) == [2, 3, 4]
    for step in (2, 3):
        there[step].verify(there[step].files)


def test_a_crash_between_two_checkpoints_of_a_step_loses_neither(tmp_path, monkeypatch):
    run = make(tmp_path, **{**KEYS, "steps": 3})
    assert attempt(run) == [0]
    path = checkpoints.place(run, 2)
    building = checkpoints.hidden(path, "tmp")
    shutil.copytree(path, building)
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self == building:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.publish(building, path)
    assert not path.exists()
    checkpoints.tidy(run)
    assert path in [one.path for one in checkpoints.whole_checkpoints(run)[0]]
    assert [*path.parent.glob(".*")] == []
