"""Which checkpoints count, where an attempt begins, and which weights fit a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import CheckpointConfig, MeasureConfig, TaskConfig
from hires.core.errors import ConfigError
from hires.core.store import checkpoints
from hires.core.store.cache import sealed
from hires.core.store.frozen import RunInputs, frozen_of
from tests.helpers.run_folders import saved_stages

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


def continuing(place: Path) -> RunConfig:
    """Returns a config that continues another run."""
    return replace(CONFIG, checkpoint=CheckpointConfig(continues=str(place)))


def test_latest_comes_first_and_a_later_attempt_counts_more(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 8)
    save(tmp_path, 2, attempt=1)  # it began anew
    assert steps_of(tmp_path) == [2, 8, 4]
    file = checkpoints.place(tmp_path, 8) / "stage00.safetensors"
    assert checkpoints.read(file.parent).num_bytes == file.stat().st_size


def test_those_of_a_complete_run_are_left_alone(tmp_path):
    assert steps_of(tmp_path) == []  # it begins at step 0
    save(tmp_path, 4)
    assert checkpoints.candidates(tmp_path, resuming("never")) == ([], [])
    (tmp_path / "record.json").write_text('{"state": "failed", "attempt": 0}')
    assert steps_of(tmp_path) == [4]
    (tmp_path / "record.json").write_text('{"state": "done", "attempt": 0}')
    assert steps_of(tmp_path) == []
    save(tmp_path, 2, attempt=1)
    assert steps_of(tmp_path) == [2]


def test_named_run_stands_in_until_there_is_an_own_checkpoint(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    save(other, 4)
    last = save(other, 6)
    assert steps_of(run, resuming(other)) == [6, 4]
    assert steps_of(run, resuming(last)) == [6]
    save(run, 7)
    assert steps_of(run, resuming(other)) == [7, 6, 4]  # which stand in if 7 is damaged


def test_named_run_that_has_done_all_steps_or_was_never_saved_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for config in (resuming(tmp_path / "empty"), continuing(Path("foo"))):
        with pytest.raises(ConfigError, match="it is no checkpoint, and has none"):
            steps_of(tmp_path / "run", config)
    save(tmp_path / "other", 10)
    with pytest.raises(ConfigError, match="use steps=11 or more"):
        steps_of(tmp_path / "run", resuming(tmp_path / "other"))
    infer = resuming(tmp_path / "other", task=TaskConfig(name="infer"))
    [checkpoint], _ = checkpoints.candidates(tmp_path / "run", infer)
    assert checkpoints.begin_of(checkpoint, infer) == 0


def test_run_to_continue_is_named_by_folder_or_checkpoint_and_differs_in_its_steps_alone(tmp_path):
    planned = frozen_of(CONFIG, {}, RunInputs())
    saved = save(tmp_path / "other", 4)
    (tmp_path / "other" / "frozen.json").write_text(planned.text())
    for place in (saved, tmp_path / "other"):
        there, _ = checkpoints.candidates(tmp_path / "run", continuing(place), planned)
        assert [(one.path, one.run) for one in there] == [(saved, tmp_path / "other")]
    for own in (None, frozen_of(replace(CONFIG, seed=1), {}, RunInputs())):
        with pytest.raises(ConfigError, match=r"differs in more than its steps; use checkpoint.r"):
            checkpoints.candidates(tmp_path / "run", continuing(saved), own)


def test_checkpoint_of_another_step_or_schema_is_passed_over(tmp_path):
    save(tmp_path, 4)
    other = save(tmp_path, 6).rename(tmp_path / "checkpoints" / "step000009")
    save(tmp_path, 5).rename(tmp_path / "checkpoints" / "best")
    save(tmp_path, 7).rename(tmp_path / "checkpoints" / ".step000007.tmp")
    whole, [problem] = checkpoints.candidates(tmp_path, CONFIG)
    assert [checkpoint.step for checkpoint in whole] == [4]
    assert "its files are of step 6" in problem
    (other / checkpoints.MANIFEST).write_text(sealed({"schema": 99}, checkpoints.MANIFEST))
    assert "has schema 99" in checkpoints.whole_checkpoints(tmp_path)[1][0]
    with pytest.raises(ConfigError, match="step000009"):
        steps_of(tmp_path / "run", resuming(other))


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


def test_tidying_removes_what_crashes_left_and_all_but_the_latest_and_the_best(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 1, attempt=1)
    for name in (".step000008.tmp", ".step000002.old", ".step000004.replaced"):
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
    broken = save(tmp_path, 3, attempt=1)
    checkpoints.tidy(tmp_path, keep=2, damaged=[broken])
    assert steps_of(tmp_path) == [3, 1, 6]  # it is not one of the two
