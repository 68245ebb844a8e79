"""Which checkpoints count, and where does an attempt begin?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.config.checkpoint_config import CheckpointConfig
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.core.config.task_config import TaskConfig
from hires.core.errors import ConfigError
from hires.core.store import checkpoints
from hires.core.store.checkpoints import refuse_other_network
from hires.core.store.frozen import RunInputs, frozen_of
from tests.helpers.run_folders import saved_stages, saved_with

CONFIG = RunConfig(steps=10, measure=MeasureConfig(warmup=0))


def save(run: Path, step: int, attempt: int = 0) -> Path:
    """Writes a checkpoint of one small file."""
    return saved_stages([{"w": [2]}], run, step, attempt)


def steps_of(run: Path, config: RunConfig = CONFIG) -> list[int]:
    """Returns the steps at which an attempt would begin, the best first."""
    return [checkpoint.step for checkpoint in checkpoints.candidates(run, config)[0]]


def resuming(resume: object, **keys: object) -> RunConfig:
    """Returns a config that resumes somewhere."""
    return replace(CONFIG, checkpoint=CheckpointConfig(resume=str(resume)), **keys)


def test_latest_comes_first_and_a_later_attempt_counts_more(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 8)
    save(tmp_path, 2, attempt=1)  # it began anew
    assert steps_of(tmp_path) == [2, 8, 4]
    file = checkpoints.place(tmp_path, 8) / "stage00.safetensors"
    assert checkpoints.read(file.parent).num_bytes == file.stat().st_size


def test_run_without_checkpoints_begins_at_step_0(tmp_path):
    assert steps_of(tmp_path) == []
    assert steps_of(tmp_path, resuming("auto")) == []


def test_those_of_a_complete_run_are_left_alone(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "record.json").write_text('{"state": "failed", "attempt": 0}')
    assert steps_of(tmp_path) == [4]
    (tmp_path / "record.json").write_text('{"state": "done", "attempt": 0}')
    assert steps_of(tmp_path) == []
    save(tmp_path, 2, attempt=1)
    assert steps_of(tmp_path) == [2]


def test_never_means_never(tmp_path):
    save(tmp_path, 4)
    assert checkpoints.candidates(tmp_path, resuming("never")) == ([], [])


def test_named_run_stands_in_until_there_is_an_own_checkpoint(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    save(other, 4)
    last = save(other, 6)
    assert steps_of(run, resuming(other)) == [6, 4]
    assert steps_of(run, resuming(last)) == [6]
    save(run, 7)
    assert steps_of(run, resuming(other)) == [7, 6, 4]  # which stand in if 7 is damaged


def test_named_run_that_has_done_all_steps_is_refused(tmp_path):
    save(tmp_path / "other", 10)
    with pytest.raises(ConfigError, match="use steps=11 or more"):
        steps_of(tmp_path / "run", resuming(tmp_path / "other"))
    infer = resuming(tmp_path / "other", task=TaskConfig(name="infer"))
    [checkpoint], _ = checkpoints.candidates(tmp_path / "run", infer)
    assert checkpoints.begin_of(checkpoint, infer) == 0


@pytest.mark.parametrize("there", [True, False])
def test_path_without_checkpoints_is_refused(tmp_path, there):
    if there:
        (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"other: it is no checkpoint, and has none.*give the"):
        steps_of(tmp_path / "run", resuming(tmp_path / "other"))


def continuing(place: Path) -> RunConfig:
    """Returns a config that continues another run."""
    return replace(CONFIG, checkpoint=CheckpointConfig(continues=str(place)))


def test_run_to_continue_is_named_by_its_folder_or_by_a_checkpoint(tmp_path):
    planned = frozen_of(CONFIG, {}, RunInputs())
    saved = save(tmp_path / "other", 4)
    (tmp_path / "other" / "frozen.json").write_text(planned.text())
    for place in (saved, tmp_path / "other"):
        there, _ = checkpoints.candidates(tmp_path / "run", continuing(place), planned)
        assert [one.path for one in there] == [saved]
        assert there[0].run == tmp_path / "other"


@pytest.mark.parametrize("own", [None, frozen_of(replace(CONFIG, seed=1), {}, RunInputs())])
def test_run_that_differs_in_more_than_its_steps_is_not_continued(tmp_path, own):
    saved = save(tmp_path / "other", 4)
    (tmp_path / "other" / "frozen.json").write_text(frozen_of(CONFIG, {}, RunInputs()).text())
    with pytest.raises(ConfigError, match=r"differs in more than its steps; use checkpoint.resume"):
        checkpoints.candidates(tmp_path / "run", continuing(saved), own)


@pytest.mark.parametrize("place", ["foo", "/foo", "/"])
def test_path_to_continue_without_checkpoints_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"continues={place}: it is no checkpoint, and has none"):
        checkpoints.candidates(tmp_path / "run", continuing(Path(place)))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda p: (p / checkpoints.MANIFEST).unlink(), "No such file"),
        (lambda p: (p / checkpoints.MANIFEST).write_text("{"), "Expecting property name"),
        (lambda p: (p / checkpoints.MANIFEST).write_text("[]"), "it holds no keys"),
        (lambda p: (p / checkpoints.MANIFEST).write_text('{"schema": 2}'), "not what was written"),
        (lambda p: edited(p, '"step": 6', '"step": 5'), "not what was written"),
        (lambda p: edited(p, '"files": {', '"files": {}, "others": {'), "not what was written"),
        (lambda p: p.rename(p.with_name("step000009")), "its files are of step 6"),
        (lambda p: (p / checkpoints.MANIFEST).write_text('{"schema": 99}'), "has schema 99"),
        (lambda p: (p / "stage00.safetensors").unlink(), "stage00.safetensors is missing"),
        (lambda p: (p / "stage00.safetensors").write_bytes(b"1"), "has 1 bytes of "),
    ],
)
def test_damaged_one_is_named_and_passed_over(tmp_path, harm, told):
    save(tmp_path, 4)
    harm(save(tmp_path, 6))
    whole, [problem] = checkpoints.candidates(tmp_path, CONFIG)
    assert [checkpoint.step for checkpoint in whole] == [4]
    assert told in problem
    assert "run the experiment again" not in problem  # the one before is used
    with pytest.raises(ConfigError, match=r"step00000[69]"):
        steps_of(tmp_path / "run", resuming(max((tmp_path / "checkpoints").iterdir())))


def edited(path: Path, old: str, new: str) -> None:
    file = path / checkpoints.MANIFEST
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_run_that_continues_a_damaged_checkpoint_takes_the_one_before(tmp_path):
    planned = frozen_of(CONFIG, {}, RunInputs())
    other = tmp_path / "other"
    before, named = save(other, 4), save(other, 6)
    (other / "frozen.json").write_text(planned.text())
    (named / checkpoints.MANIFEST).unlink()
    there, [problem] = checkpoints.candidates(tmp_path / "run", continuing(named), planned)
    assert [one.path for one in there] == [before]
    assert "step000006" in problem


def test_best_of_another_step_than_was_noted_is_none(tmp_path):
    save(tmp_path, 4)
    checkpoints.write_best(tmp_path, checkpoints.Best(4, "top1", 0.5))
    file = tmp_path / "checkpoints" / "best.json"
    assert checkpoints.read_best(tmp_path) == checkpoints.Best(4, "top1", 0.5)
    file.write_text(file.read_text().replace("4", "6"))
    assert checkpoints.read_best(tmp_path) is None


def test_folder_of_another_name_is_none(tmp_path):
    save(tmp_path, 4).rename(tmp_path / "checkpoints" / "best")
    save(tmp_path, 5).rename(tmp_path / "checkpoints" / ".step000005.tmp")
    assert checkpoints.whole_checkpoints(tmp_path) == ([], [])


def test_tidying_removes_what_crashes_left_and_all_but_the_latest_and_the_best(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 1, attempt=1)
    for name in (".step000008.tmp", ".step000002.old"):
        (tmp_path / "checkpoints" / name).mkdir()
    checkpoints.tidy(tmp_path)
    assert steps_of(tmp_path) == [1, 6, 4, 2]
    checkpoints.write_best(tmp_path, checkpoints.Best(4, "top1", 0.5))
    checkpoints.tidy(tmp_path, keep=2)
    assert steps_of(tmp_path) == [1, 6, 4]
    (tmp_path / "checkpoints" / "best.json").unlink()
    checkpoints.tidy(tmp_path, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step000001",
        "step000006",
    ]


@pytest.mark.parametrize(("key", "value"), [("every", -1), ("keep", 0), ("resume", "")])
def test_senseless_value_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"checkpoint.{key}=") as caught:
        CheckpointConfig(**{key: value})
    assert "null" not in str(caught.value)  # it is refused, too


SHAPES = {f"layer{n}.weight": [n + 1, 3] for n in range(6)}


def test_first_layers_that_differ_are_named_and_the_others_counted(tmp_path):
    checkpoint = checkpoints.read(saved_with(SHAPES, tmp_path))
    needed = {name: [9, 9] for name in SHAPES}
    with pytest.raises(ConfigError) as caught:
        refuse_other_network([checkpoint], {"new.bias": [1], **needed}, "there")
    assert str(caught.value) == (
        "checkpoint.resume=there: step000001 is of another network: it has no new.bias; "
        "layer0.weight is [1, 3] there and [9, 9] here; layer1.weight is [2, 3] there and [9, 9] "
        "here; and 4 more; use the model and model.classes of its run"
    )
    refuse_other_network([checkpoint], SHAPES, "there")
    refuse_other_network([], needed, "there")
