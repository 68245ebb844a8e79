"""A run that is killed anywhere goes on bit by bit as if it had not been, and so does a longer one.

One run has all that a checkpoint must carry: tiles and GEMS, AdamW, running means, clipping, the
loss scale of fp16, dropout, a loss that draws, augmentation, a schedule of rates, and evaluations.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hires.core.errors import PREEMPTED, ConfigError
from hires.core.ranks.world import World
from hires.core.store import checkpoints, records
from hires.core.store.attempts import Attempt
from hires.engine import checkpoint, tensorfile, validate
from tests.helpers.custom_nets import Steep
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import (
    attempt,
    config_at,
    killed_attempt,
    lines_of,
    losses,
    make,
    mean_losses,
    next_number,
    numbered,
    tensors_at,
)

pytestmark = pytest.mark.dist


class SteepDropout(Steep):
    """Overflows fp16 at first, and draws random numbers in each step."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes)
        self.norm = nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.2), nn.Dropout2d(0.1))


def noisy(output: Tensor, labels: Tensor) -> Tensor:
    """A custom loss that draws random numbers in each step."""
    return nn.functional.cross_entropy(output + 0.1 * torch.randn_like(output), labels)


GEMS = {"tiles": [2, 1], "stages": 2, "directions": 2, "schedule": "gems"}
RICH: dict[str, Any] = {
    "image": [18, 14],
    "batch": 4,
    "steps": 8,
    "parallel": GEMS,
    "model": {"name": "custom", "target": f"{__name__}:SteepDropout", "classes": 4},
    "data": {"length": 20, "classes": 4, "validation": 0.3},
    "loss": {"name": "custom", "target": f"{__name__}:noisy"},
    "augment": {"flip": "both", "brightness": 0.2},
    "precision": {"name": "fp16", "scale_interval": 2},
    "optimizer": {
        "name": "adamw",
        "lr": 1e-3,
        "args": {"eps": 1e-4},
        "ema": 0.75,
        "clip_norm": 0.5,
    },
    "lr_schedule": {"name": "cosine", "warmup": 1, "steps": 8},
    "validate": {"every": 2, "weights": "ema", "metric": "loss"},
    "checkpoint": {"every": 2, "keep": 2},
    "measure": {"warmup": 0},
}
KILLS: list[tuple[str, int, int]] = [
    # where a rank is killed, in which step or at which call, and the step at which the run goes on
    ("step", 1, 0),
    ("validation", 1, 0),
    ("write", 3, 0),
    ("manifest", 1, 0),
    ("rename", 1, 0),
    ("best", 1, 2),
    ("preempted", 3, 3),
    ("step", 5, 4),
    ("remove", 1, 6),
]


def killed_at(world: World, folder: str, number: int, where: str, calls: int) -> int:
    """Runs an attempt on one rank; the guilty one is killed in a place, at its call of a number."""
    owner, name, guilty = {
        "validation": (validate, "evaluate_pass", 0),
        "write": (tensorfile, "write", world.size - 1),
        "manifest": (checkpoint, "write_atomically", 0),
        "rename": (checkpoints, "publish", 0),
        "best": (checkpoints, "write_best", 0),
        "remove": (checkpoints, "remove", 0),
    }[where]
    whole, left = getattr(owner, name), [calls]

    def deadly(*args: Any, **keys: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **keys)

    if world.rank == guilty:
        setattr(owner, name, deadly)
    return numbered(world, folder, number)


def stop(run: Path, where: str, calls: int) -> None:
    """Runs another attempt of a folder until it is killed, or preempted before a step."""
    if where == "preempted":
        assert attempt(run, stop_at=calls) == [PREEMPTED] * 3
        return
    if where == "step":
        killed_attempt(run, calls, 1)
        return
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        run_ranks(killed_at, 3, str(run), next_number(run), where, calls)


def noted(run: Path, number: int, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns what an attempt noted in each step, by (step, rank), but for times."""
    return {
        (line["step"], line["rank"]): {k: v for k, v in line.items() if not k.endswith("_s")}
        for line in lines_of(run, number, kind)
    }


def is_same(found: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> bool:
    """Whether two checkpoints hold the same bits."""
    return found.keys() == wanted.keys() and all(map(torch.equal, found.values(), wanted.values()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped."""
    run = make(tmp_path_factory.mktemp("whole"), **RICH)
    assert attempt(run) == [0] * 3
    return run


def test_run_killed_in_every_place_ends_with_the_bits_of_the_whole_one(whole, tmp_path):
    run = make(tmp_path, **RICH)
    begins = [0]
    for where, calls, begin in KILLS:
        stop(run, where, calls)
        there, damaged = checkpoints.whole_checkpoints(run)
        assert not damaged, where
        assert ([one.step for one in there] or [0])[0] == begin, where
        begins.append(begin)
    assert attempt(run) == [0] * 3
    for number, begin in enumerate(begins):
        for kind in ("step", "validated"):
            found, wanted = noted(run, number, kind), noted(whole, 0, kind)
            assert found.items() <= wanted.items(), number  # loss, norm, scale, rate, metrics
            assert all(step >= begin for step, _ in found), number
    assert {step for step, _ in noted(run, len(KILLS), "step")} == {6, 7}
    assert is_same(tensors_at(run, 8), tensors_at(whole, 8))
    ends = [checkpoints.read(checkpoints.place(one, 8)) for one in (run, whole)]
    assert ends[0].numbers == ends[1].numbers
    assert checkpoints.read_best(run) == checkpoints.read_best(whole)
    names = [sorted(p.name for p in (one / checkpoints.FOLDER).iterdir()) for one in (run, whole)]
    assert names[0] == names[1]
    records_of = [records.read_record(one) for one in (run, whole)]
    for key in ("state", "loss", "skipped_steps", "loss_scale", "validation"):
        ours, theirs = (json.loads(json.dumps(one[key])) for one in records_of)
        for one in (ours, theirs) if key == "validation" else ():
            one["best"].pop("validate_s"), one["last"].pop("validate_s")
        assert ours == theirs, key
    assert records_of[0]["resumed"] == {"step": 6, "checkpoint": "step000006", "attempt": 8}


def test_longer_run_continues_a_shorter_one_bit_by_bit(whole, tmp_path):
    first = make(tmp_path, **{**RICH, "steps": 5})
    assert attempt(first) == [0] * 3
    place = checkpoints.place(first, 4)
    keys = {**RICH, "checkpoint": {**RICH["checkpoint"], "continues": str(place)}}
    run = make(tmp_path, **keys)
    stop(run, "step", 7)  # so that the checkpoint before is another attempt's
    assert attempt(run) == [0] * 3
    assert is_same(tensors_at(run, 8), tensors_at(whole, 8))
    wanted = noted(whole, 0, "step")
    assert noted(run, 1, "step").items() <= wanted.items()
    record = records.read_record(run)
    assert record["lineage"] == [{"run": first.name, "step": 4}]
    for key in ("skipped_steps", "loss_scale"):
        assert record[key] == records.read_record(whole)[key]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"parallel": {"stages": 2}}])
def test_run_that_differs_in_more_than_its_steps_is_not_continued(whole, tmp_path, changed):
    saving = {**RICH["checkpoint"], "continues": str(checkpoints.place(whole, 8))}
    other = make(tmp_path, **{**RICH, **changed, "steps": 9, "checkpoint": saving})
    with pytest.raises(ConfigError, match="differs in more than its steps"):
        checkpoints.candidates(other, config_at(other))


def test_checkpoint_of_any_layout_resumes_in_any_other(tmp_path):
    # eps far above the noise of a gradient that is 0: Adam divides a gradient by its own size.
    optimizer = {"name": "adamw", "lr": 1e-3, "args": {"eps": 1e-3}, "ema": 0.75, "clip_norm": 1.0}
    two = {"microbatches": 2}
    layouts: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({"tiles": [3, 1], **two}, {}, 2),
        ({"replicas": 2}, {"shard": True, "exchange": "scatter"}, 4),
        ({"tiles": [2, 1], **two}, {}, 5),
        ({"stages": 2, **two}, {}, 6),
        (two, {}, 7),
    ]
    measure = {"warmup": 0}
    plain = make(tmp_path / "whole", steps=7, parallel=two, optimizer=optimizer, measure=measure)
    assert attempt(plain) == [0]
    found, saving = list[float](), dict[str, Any](at_end="always")
    for number, (parallel, update, steps) in enumerate(layouts):
        keys = {"parallel": parallel, "optimizer": {**optimizer, **update}, "measure": measure}
        run = make(tmp_path / str(number), steps=steps, checkpoint=saving, **keys)
        assert set(attempt(run)) == {0}
        found += mean_losses(run, 0)
        saving = {"resume": str(run), "at_end": "always"}
    assert found == pytest.approx(mean_losses(plain, 0), rel=1e-10)


@pytest.mark.parametrize(
    ("saving", "steps"), [({"every": 3, "keep": 1, "at_end": "never"}, [6]), ({}, [])]
)
def test_checkpoints_are_saved_and_kept_as_the_keys_say(tmp_path, saving, steps):
    run = make(tmp_path, checkpoint=saving)
    assert attempt(run) == [0]
    names = sorted(path.name for path in run.glob(f"{checkpoints.FOLDER}/*"))
    assert names == [f"step{step:06d}" for step in steps]


def test_complete_run_begins_anew_and_one_without_a_record_is_completed(tmp_path):
    run = make(tmp_path, checkpoint={"every": 3})
    assert attempt(run) == attempt(run) == [0]
    assert losses(run, 1) == losses(run, 0)
    assert records.read_record(run)["resumed"] is None
    there, damaged = checkpoints.whole_checkpoints(run)
    assert ([(c.attempt, c.step) for c in there], damaged) == ([(1, 8), (1, 6)], [])
    before = records.read_record(run)
    (run / "record.json").unlink()
    assert attempt(run) == [0]
    assert losses(run, 2) == {}
    record = records.read_record(run)
    assert (record["state"], record["loss"]) == ("done", before["loss"])


def test_what_a_resume_does_not_take_along_is_said_and_recorded(tmp_path):
    first = make(tmp_path, steps=3, checkpoint={"at_end": "always"})
    assert attempt(first) == [0]
    keys = {"seed": 1, "batch": 4, "optimizer": {"name": "adam"}, "data": {"shuffle": False}}
    keys |= {"augment": {"flip": "both"}, "lr_schedule": {"name": "cosine"}}
    keys |= {"loss": {"label_smoothing": 0.1}, "precision": {"name": "fp32"}}
    run = make(tmp_path, steps=6, **keys, checkpoint={"resume": str(first), "every": 2})
    assert [attempt(run, stop_at=5), attempt(run)] == [[PREEMPTED], [0]]
    # The other optimiser begins anew, and counts its own steps alone.
    assert checkpoints.read(checkpoints.place(run, 6)).numbers["optimizer.step"] == [3]
    events = Attempt(run, 0).events
    [text] = [event["text"] for event in events if event["event"] == "resume_differs"]
    there = ["seed=0", f"batch={config_at(first).batch}", "optimizer.name=sgd"]
    there += ["augment.flip=", "lr_schedule.name=", "loss.label_smoothing=", "data.shuffle="]
    there.append("precision.name=fp64")
    for word in [*there, "seed=1", "batch=4", "optimizer.name=adam", "exp_avg_sq", first.name]:
        assert word in text
    record = records.read_record(run)
    assert record["resumed"]["checkpoint"] == "step000005"
    [origin] = record["lineage"]
    assert (origin["run"], origin["step"]) == (first.name, 3)
    assert all(word in " ".join(origin["differs"]) for word in there)


def test_inference_has_the_parameters_of_a_training_and_saves_none(tmp_path):
    trained = make(tmp_path / "trained", checkpoint={"every": 8})
    assert attempt(trained) == [0]
    found = []
    for name, keys in (
        ("resumed", {"checkpoint": {"resume": str(trained)}}),
        ("named", {"weights": str(trained)}),
        ("first", {}),
    ):
        keys = {"parallel": {"tiles": [2, 1]}, "data": {"length": 8}, "batch": 1, **keys}
        run = make(tmp_path / name, task={"name": "evaluate"}, **keys)
        assert any(f["recipe"] for f in records.read_plan(run)["graph"]["params"].values())
        assert [attempt(run, stop_at=4), attempt(run)] == [[PREEMPTED] * 2, [0] * 2]
        assert not (run / checkpoints.FOLDER).exists()
        found.append(records.read_record(run)["evaluation"]["loss"])
    assert found[0] == found[1] != found[2]


def test_checkpoint_of_another_network_is_refused(tmp_path):
    saved = make(tmp_path / "saved")
    attempt(saved, stop_at=2)
    model = {"name": "preact_resnet", "depth": 11, "classes": 7}
    run = make(tmp_path / "other", model=model, checkpoint={"resume": str(saved)})
    with pytest.raises(AssertionError, match="the checkpoint is of another network"):
        attempt(run)


def synced(world: World, folder: str, number: int) -> list[str]:
    """Runs an attempt; returns in which order names were brought to the disk and given."""
    order, fsync, rename = list[str](), os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        order.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def note_rename(path: Path, target: Any) -> Any:
        order.append(f"rename {path.name}")
        return rename(path, target)

    os.fsync, Path.rename = note_fsync, note_rename  # type: ignore[method-assign, assignment]
    assert numbered(world, folder, number) == 0
    return order


def test_files_are_on_the_disk_before_a_checkpoint_has_its_name(tmp_path):
    run = make(tmp_path, steps=3, checkpoint={"every": 3})
    [order] = run_ranks(synced, 1, str(run), 0)
    hidden = ".step000003.tmp"
    named = order.index(f"rename {hidden}")
    files = [one for one in order[:named] if "safetensors" in one]
    assert len(files) == 2
    assert order.index(f"fsync {hidden}") > max(map(order.index, files))
    assert any(checkpoints.MANIFEST in one for one in order[: order.index(f"fsync {hidden}")])
    assert f"fsync {checkpoints.FOLDER}" in order[named:]
