import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.errors import ConfigError, RunError
from hires.core.store import attempts, records, rundir
from tests.helpers.new_runs import ARGV, PLAN, complete, leftovers


def test_new_run_is_frozen_whole(config):
    run = rundir.create(config, PLAN, ARGV)
    assert run.attempt == 0
    assert run.path.parent == Path(config.results) / "default"
    assert run.name.startswith("resnet50-224x224-single-fp32-")
    assert records.read_config(run) == config
    assert records.read_plan(run) == PLAN
    assert os.access(run.path / "launch.sh", os.X_OK)
    env = json.loads((run.attempt_dir / "env.json").read_text())
    assert env["argv"] == ARGV
    assert env["reproduce"] == "hires run parallel=sp"
    assert env["provenance"]["hardware"]["cores"] >= 1
    assert (run.attempt_dir / "logs").is_dir()
    assert not leftovers(Path(config.results))


def test_complete_run_that_is_wanted_again_gets_another_attempt(config):
    complete(rundir.create(config, PLAN, ARGV))
    assert rundir.create(config, PLAN, ARGV).attempt == 1


@pytest.mark.parametrize("record", [None, '{"state": "failed", "attempt": 0}', '{"state": "do'])
def test_incomplete_run_gets_its_next_attempt(config, record):
    run = rundir.create(config, PLAN, ARGV)
    if record is not None:
        (run.path / "record.json").write_text(record)
    assert rundir.create(config, PLAN, ARGV) == replace(run, attempt=1)


def test_changed_plan_replaces_the_frozen_one_which_stays_with_its_attempt(config):
    run = rundir.create(config, PLAN, ARGV)
    newer = {**PLAN, "verdict": "deadlock-free, 3 messages"}
    assert rundir.create(config, newer, ARGV).attempt == 1
    assert records.read_plan(run) == newer
    assert json.loads((run.path / "a0/plan.json").read_text()) == PLAN
    assert not (run.path / "a0/config.yaml").exists()


def test_edited_config_is_not_run_as_something_else(config):
    run = rundir.create(config, PLAN, ARGV)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("batch: 8", "batch: 16"))
    complete(run)
    with pytest.raises(RunError, match="was edited or damaged"):
        rundir.create(config, PLAN, ARGV)


def test_open_run_is_at_the_latest_attempt_or_the_complete_one(config):
    run = rundir.create(config, PLAN, ARGV)
    attempts.next_attempt(run.path)
    assert rundir.open_run(run.path).attempt == 1
    complete(run)
    assert rundir.open_run(run.path) == run


def test_attempt_by_hand_is_reproduced_by_the_first_command(config):
    run = rundir.create(config, PLAN, ARGV)
    number = attempts.next_attempt(run.path)
    env = json.loads((run.path / f"a{number}/env.json").read_text())
    assert (env["argv"], env["reproduce"]) == (None, "hires run parallel=sp")


def test_attempts_taken_at_once_are_distinct(config):
    run = rundir.create(config, PLAN, ARGV)
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: attempts.next_attempt(run.path), range(32)))
    assert sorted(numbers) == list(range(1, 33))


def test_frozen_run_is_pending_until_its_first_attempt(config):
    path = rundir.freeze(config, PLAN, ARGV)
    assert rundir.frozen_folder(path) == path
    assert rundir.done_attempts(path) == []
    assert not list(path.glob("a*"))
    with pytest.raises(RunError, match="is pending: no attempt has started"):
        rundir.open_run(path)
    newer = {**PLAN, "verdict": "deadlock-free, 3 messages"}
    assert rundir.freeze(config, newer, ARGV) == path
    assert records.read_plan(path) == newer
    assert attempts.next_attempt(path, ARGV) == 0
    run = rundir.open_run(path)
    assert (run.path, run.attempt) == (path, 0)
    assert json.loads((run.attempt_dir / "env.json").read_text())["reproduce"] == (
        "hires run parallel=sp"
    )
    assert rundir.create(config, PLAN, ARGV).attempt == 1


def test_done_attempts_are_those_that_ended_well(config):
    run = rundir.create(config, PLAN, ARGV)
    for state in ("failed", "done", "cancelled", "done"):
        folder = run.path / f"a{attempts.next_attempt(run.path, ARGV)}"
        (folder / "exit.json").write_text(json.dumps({"state": state}))
    (run.attempt_dir / "exit.json").write_text("{")
    assert rundir.done_attempts(run.path) == [2, 4]


def test_find_by_path_name_campaign_and_hash(config):
    run = rundir.create(config, PLAN, ARGV)
    for name in (
        str(run.path),
        run.name,
        f"default/{run.name}",
        run.name[-8:],
        run.name[-8:-3],
    ):
        assert rundir.open_run(rundir.locate(name, config.results)) == run
    with pytest.raises(ConfigError, match="there is no run 'nothing'"):
        rundir.locate("nothing", config.results)
    with pytest.raises(ConfigError, match="there is no run ''"):
        rundir.locate("", config.results)


def test_find_refuses_what_may_be_several(config):
    for seed in (1, 2):
        rundir.create(replace(config, seed=seed), PLAN, ARGV)
    with pytest.raises(ConfigError, match="may be any of 2 runs"):
        rundir.locate("resnet50-224x224", config.results)
