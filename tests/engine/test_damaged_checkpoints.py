"""Is a checkpoint of which anything differs from what was written named, and never used?"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hires.core.errors import PREEMPTED
from hires.core.ranks.world import World
from hires.core.store import checkpoints, file_names, records
from hires.core.store.reading import read_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, losses, make, numbered

pytestmark = pytest.mark.dist

NET = {"name": "preact_resnet", "n": 1}
KEYS = {"model": NET, "precision": {"name": "fp32"}, "steps": 6}
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


def without(folder: Path) -> None:
    """Leaves a file out of the manifest."""
    values = json.loads((folder / checkpoints.MANIFEST).read_text())
    del values["files"]["momentum00.safetensors"]
    (folder / checkpoints.MANIFEST).write_text(json.dumps(values))


def emptied(folder: Path) -> None:
    """Leaves all files out of the manifest."""
    values = json.loads((folder / checkpoints.MANIFEST).read_text())
    (folder / checkpoints.MANIFEST).write_text(json.dumps({**values, "files": {}}))


STAGE, MOMENTUM, RANDOM = (f"{name}.safetensors" for name in ("stage00", "momentum00", "rank0000"))
FILES = (STAGE, MOMENTUM, RANDOM, checkpoints.MANIFEST)
PLACES = random.Random(7)
HARMS: dict[str, Harm] = {
    f"{file} bit {place}": flip(file, place)
    for file in FILES
    for place in (0, PLACES.randrange(8, 400), -1)
}
HARMS |= {f"{file} short": lambda f, n=file: (f / n).write_bytes(b"0") for file in FILES}
HARMS |= {f"{file} gone": lambda f, n=file: (f / n).unlink() for file in FILES}
HARMS |= {
    "name of a momentum": replace(MOMENTUM, b'"conv1.weight"', b'"conv1.weighu"'),
    "name of a weight": replace(STAGE, b'"conv1.weight"', b'"conv1.weighu"'),
    "type": replace(STAGE, b'"dtype":"F32"', b'"dtype":"I32"'),
    "swapped": swap(STAGE, MOMENTUM),
    "step": replace(checkpoints.MANIFEST, b'"step": 4', b'"step": 5'),
    "left out": without,
    "emptied": emptied,
}


def attempts_of(world: World, folders: list[str]) -> list[int]:
    """Runs the second attempt of some run folders, one after the other, on one rank."""
    return [numbered(world, folder, 1, None) for folder in folders]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved after steps 2 and 4, and stopped there."""
    run = make(tmp_path_factory.mktemp("damaged"), **KEYS, checkpoint={"every": 2})
    assert attempt(run, stop_at=4) == [PREEMPTED]
    (file_names.attempt_dir(run, 1)).mkdir()
    return run


def test_run_goes_on_from_the_one_before_whatever_is_damaged(stopped, tmp_path):
    copies = {name: shutil.copytree(stopped, tmp_path / name / "run") for name in HARMS}
    copies["unharmed"] = shutil.copytree(stopped, tmp_path / "unharmed" / "run")
    for name, harm in HARMS.items():
        harm(checkpoints.place(copies[name], 4))
    [codes] = run_ranks(attempts_of, 1, [str(path) for path in copies.values()])
    assert set(codes) == {0}
    whole = losses(copies.pop("unharmed"), 0, 1)
    for name, run in copies.items():
        resumed = records.read_record(run)["resumed"]
        assert (name, resumed["checkpoint"]) == (name, "step000002")
        before = {key: loss for key, loss in losses(run, 0).items() if key[0] < 2}
        assert {**before, **losses(run, 1)} == whole, name  # bit for bit
        texts = damage(run)
        assert texts, name
        assert all("step000004" in text and "step000002 is used" in text for text in texts), name


def damage(run: Path) -> list[str]:
    events = read_lines(file_names.attempt_dir(run, 1) / "events.jsonl")
    return [event["text"] for event in events if event["event"] == "checkpoint_damaged"]


def test_run_without_a_whole_one_says_that_it_begins_anew(stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for step in (2, 4):
        flip(STAGE, 20)(checkpoints.place(run, step))
    assert run_ranks(attempts_of, 1, [str(run)]) == [[0]]
    assert records.read_record(run)["resumed"] is None
    texts = damage(run)
    assert [text for text in texts if "step000002" in text and "begins at step 0" in text]
    assert not any("is used" in text for text in texts)


def test_damaged_one_does_not_count_among_those_that_are_kept(stopped, tmp_path):
    # It has the latest step, so with two to keep, the whole one before would go.
    run = shutil.copytree(stopped, tmp_path / "run")
    flip(STAGE, -3)(checkpoints.place(run, 4))
    assert run_ranks(stopped_after, 1, str(run), 4) == [PREEMPTED]
    there = {one.step: one for one in checkpoints.whole_checkpoints(run)[0]}
    for one in there.values():
        one.verify(one.files)
    assert sorted(there) == [2, 4]


def stopped_after(world: World, folder: str, step: int) -> int:
    """Runs the second attempt up to a step."""
    return numbered(world, folder, 1, step)


@pytest.mark.parametrize("harm", ["name of a weight", "type", f"{STAGE} bit -1", "emptied"])
@pytest.mark.parametrize("verb", ["show", "export", "run"])
def test_verbs_name_the_damage_and_take_the_one_before(
    stopped, tmp_path, hires, caplog, harm, verb
):
    run = shutil.copytree(stopped, tmp_path / "run")
    last, out = checkpoints.place(run, 4), tmp_path / "w.safetensors"
    HARMS[harm](last)
    words = {
        "show": ["weights", "show"],
        "export": ["weights", "export", "--out", str(out)],
        "run": ["run", "task=evaluate", "--dry-run"],
    }[verb]
    named = [f"weights={last}" if verb == "run" else str(last)]
    answer = hires(*words, *named)
    assert answer.code == 2
    assert "step000004 is damaged" in answer.err
    assert not out.exists()
    if verb != "run":
        answer = hires(*words, str(run))
        assert answer.code == 0, answer.err
        assert "step000004 is damaged" in caplog.text
        assert "step000002 is used" in caplog.text
