import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core import files, naming, records, rundir
from hires.core.config import (
    CheckpointConfig,
    CommConfig,
    LauncherConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from hires.core.errors import ConfigError, RunError
from hires.core.layout import ParallelConfig

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
PLAN = {"world": 2, "placement": [], "totals": {}}
ARGV = ["hires", "run", "parallel=sp"]


@pytest.fixture
def config(tmp_path):
    return RunConfig(results=str(tmp_path / "results"))


def complete(run):
    """Makes a run look complete, as its last rank would."""
    text = json.dumps({"state": "done", "attempt": run.attempt})
    (run.path / "record.json").write_text(text)


def leftovers(folder):
    """Returns the temporary files and folders below a folder."""
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_new_run_is_frozen_whole(config):
    run = rundir.create(config, PLAN, ARGV)
    assert (run.attempt, run.complete) == (0, False)
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


def test_complete_run_is_skipped_unless_asked_again(config):
    complete(rundir.create(config, PLAN, ARGV))
    skipped = rundir.create(config, PLAN, ARGV)
    assert (skipped.attempt, skipped.complete) == (0, True)
    again = rundir.create(config, PLAN, ARGV, again=True)
    assert (again.attempt, again.complete) == (1, False)


@pytest.mark.parametrize("record", [None, '{"state": "failed", "attempt": 0}', '{"state": "do'])
def test_incomplete_run_gets_its_next_attempt(config, record):
    run = rundir.create(config, PLAN, ARGV)
    if record is not None:
        (run.path / "record.json").write_text(record)
    assert rundir.create(config, PLAN, ARGV) == replace(run, attempt=1)


def test_cosmetic_keys_do_not_change_the_run(config):
    run = rundir.create(config, PLAN, ARGV)
    other = replace(config, launcher=LauncherConfig(port=29500), comm=CommConfig(timeout_s=9.0))
    second = rundir.create(other, PLAN, ARGV)
    assert second.path == run.path
    assert records.read_config(second).launcher.port == 29500
    assert naming.run_name(replace(config, campaign="x", results="y")) == run.name


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"steps": 13},
        {"launcher": LauncherConfig(threads=2)},
        {"parallel": ParallelConfig(name="sp", tiles=[2, 1])},
        {"precision": PrecisionConfig("bf16")},
        {"model": ModelConfig(name="custom", target="a.b:unet", args={"width": 3})},
    ],
)
def test_what_is_computed_or_measured_changes_the_run(config, change):
    assert naming.run_name(replace(config, **change)) != naming.run_name(config)


@pytest.mark.parametrize("change", [{"every": 7}, {"keep": 5}, {"resume": "never"}])
def test_saving_makes_no_other_run(config, change):
    saved = replace(config, checkpoint=CheckpointConfig(**change))
    assert naming.run_name(saved) == naming.run_name(config)


def test_run_is_called_as_before_there_were_checkpoints(config):
    older = naming.plain(config)
    del older["checkpoint"]
    assert naming.identity(older) == naming.identity(naming.plain(config))


def test_run_that_begins_with_another_one_is_another_run(config):
    begun = replace(config, checkpoint=CheckpointConfig(resume="/elsewhere", every=1))
    assert naming.run_name(begun) != naming.run_name(config)
    again = replace(config, checkpoint=CheckpointConfig(resume="/elsewhere", every=2))
    assert naming.run_name(again) == naming.run_name(begun)


def test_hash_does_not_depend_on_process_or_order(config):
    """Python's own hash is salted: two processes would not agree."""
    code = "from hires.core import config, naming; print(naming.run_name(config.RunConfig()))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == naming.run_name(RunConfig(results="elsewhere"))


def test_changed_plan_replaces_the_frozen_one_which_stays_with_its_attempt(config):
    run = rundir.create(config, PLAN, ARGV)
    newer = {**PLAN, "verdict": "deadlock-free, 3 messages"}
    assert rundir.create(config, newer, ARGV).attempt == 1
    assert records.read_plan(run) == newer
    assert json.loads((run.path / "a0/plan.json").read_text()) == PLAN
    assert not (run.path / "a0/config.yaml").exists()


def test_plan_of_a_complete_run_stays(config):
    run = rundir.create(config, PLAN, ARGV)
    complete(run)
    rundir.create(config, {**PLAN, "world": 3}, ARGV)
    assert records.read_plan(run) == PLAN


def test_edited_config_is_not_run_as_something_else(config):
    run = rundir.create(config, PLAN, ARGV)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("batch: 8", "batch: 16"))
    complete(run)
    with pytest.raises(RunError, match="was edited or damaged"):
        rundir.create(config, PLAN, ARGV)


def test_plain_values_only_in_model_args(config):
    odd = replace(config, model=ModelConfig(name="custom", target="a:b", args={"f": object()}))
    with pytest.raises(ConfigError, match=r"model\.args"):
        rundir.create(odd, PLAN, ARGV)
    tuples = replace(config, model=ModelConfig(name="custom", target="a:b", args={"f": (1, 2)}))
    assert records.read_config(rundir.create(tuples, PLAN, ARGV)).model.args == {"f": [1, 2]}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8"), max_size=8),
        max_size=4,
    )
)
def test_frozen_config_reads_back_as_it_was(tmp_path_factory, args):
    config = RunConfig(
        results=str(tmp_path_factory.mktemp("results")),
        model=ModelConfig(name="custom", target="a:b", args=args),
    )
    assert records.read_config(rundir.create(config, PLAN, ARGV)) == config


@given(st.text(), st.text())
def test_slug_is_safe_in_a_path_and_a_shell(layout, target):
    config = RunConfig(
        model=ModelConfig(name="custom", target="a:" + target.replace(":", "")),
        parallel=ParallelConfig(name=layout),
    )
    name = naming.run_name(config)
    assert set(name) <= set(naming_letters())
    assert len(name) < 200


def naming_letters():
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-"


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (ModelConfig(depth=101), "resnet101"),
        (ModelConfig(name="preact_resnet", n=12), "preact_resnet110"),
        (ModelConfig(name="amoebanet"), "amoebanet18_208"),
        (ModelConfig(name="unet", upsample="nearest"), "unet4_64_nearest"),
        (ModelConfig(name="edsr", scale=3), "edsr16_64_x3"),
        (ModelConfig(name="custom", target="my.nets:unet"), "custom:unet"),
    ],
)
def test_model_labels(model, label):
    assert naming.model_label(model) == label


CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hires.core import rundir
from hires.core.config import RunConfig
def create(seed):
    return rundir.create(RunConfig(results=sys.argv[1], seed=seed), {"world": 1}, [])
seeds = [0] * 25 + list(range(1, 26))
with ThreadPoolExecutor(10) as pool:
    for run in pool.map(create, seeds):
        print(run.path, run.attempt)
"""


def test_two_hundred_creations_at_once(tmp_path):
    """Equal configs share one folder and never an attempt; distinct ones never share a folder."""
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    makers = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in "1234"
    ]
    lines = [line for maker in makers for line in maker.communicate(timeout=50)[0].splitlines()]
    assert [maker.returncode for maker in makers] == [0] * 4
    assert len(lines) == len(set(lines)) == 200
    folders = sorted((tmp_path / "default").iterdir())
    attempts = sorted(len(list(folder.glob("a*"))) for folder in folders)
    assert attempts == [4] * 25 + [100]
    assert all((folder / "plan.json").read_text() for folder in folders)
    assert not leftovers(tmp_path)


def test_readers_never_see_half_a_folder(config):
    path = Path(config.results) / "default" / naming.run_name(config)
    wanted = {"config.yaml", "plan.json", "launch.sh", "a0"}
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError):  # it comes and goes
                seen.append({entry.name for entry in path.iterdir()})

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(20):
        rundir.create(config, PLAN, ARGV)
        # Moved, not deleted: a reader that has opened it would see it shrink.
        path.rename(path.with_name(f"old{number}"))
    stop.set()
    thread.join()
    assert all(names == wanted for names in seen)


@pytest.fixture
def full_disk(monkeypatch):
    """Lets every write to disk fail as on a full one."""

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", fail)


def test_full_disk_leaves_nothing(config, full_disk):
    with pytest.raises(
        RunError, match=r"cannot write .*: No space left on device; free some space"
    ):
        rundir.create(config, PLAN, ARGV)
    assert not list((Path(config.results) / "default").iterdir())


def test_full_disk_leaves_no_attempt(config, full_disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda fd: None)
        run = rundir.create(config, PLAN, ARGV)
    with pytest.raises(RunError, match="No space left"):
        rundir.create(config, PLAN, ARGV)
    assert [p.name for p in run.path.glob("a*")] == ["a0"]
    assert not leftovers(run.path)


@pytest.mark.parametrize("place", ["", "default"])
def test_file_in_the_way_of_the_results_folder(config, place):
    file = Path(config.results) / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with pytest.raises(RunError, match="a file is where a folder should be"):
        rundir.create(config, PLAN, ARGV)


def test_file_in_the_way_of_the_run_folder(config):
    file = Path(config.results) / "default" / naming.run_name(config)
    file.parent.mkdir(parents=True)
    file.write_text("")
    with pytest.raises(RunError, match="a file is where a folder should be"):
        rundir.create(config, PLAN, ARGV)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_results_folder_without_permission(config):
    Path(config.results).mkdir(mode=0o500)
    with pytest.raises(RunError, match="results=FOLDER"):
        rundir.create(config, PLAN, ARGV)


def test_results_on_a_read_only_file_system():
    with pytest.raises(RunError, match=r"choose a(nother)? folder"):
        rundir.create(RunConfig(results="/proc/hires"), PLAN, ARGV)


def test_campaign_with_a_name_that_is_too_long(config):
    with pytest.raises(RunError, match="shorter campaign"):
        rundir.create(replace(config, campaign="x" * 300), PLAN, ARGV)


def test_find_by_path_name_campaign_and_hash(config):
    run = rundir.create(config, PLAN, ARGV)
    for name in (str(run.path), run.name, f"default/{run.name}", run.name[-8:], run.name[-8:-3]):
        assert rundir.find(name, config.results) == run
    with pytest.raises(ConfigError, match="there is no run 'nothing'"):
        rundir.find("nothing", config.results)
    with pytest.raises(ConfigError, match="there is no run ''"):
        rundir.find("", config.results)


def test_find_refuses_what_may_be_several(config):
    for seed in (1, 2):
        rundir.create(replace(config, seed=seed), PLAN, ARGV)
    with pytest.raises(ConfigError, match="may be any of 2 runs"):
        rundir.find("resnet50-224x224", config.results)


def test_open_run_is_at_the_latest_attempt_or_the_complete_one(config):
    run = rundir.create(config, PLAN, ARGV)
    rundir.next_attempt(run.path)
    assert rundir.open_run(run.path).attempt == 1
    complete(run)
    assert rundir.open_run(run.path) == replace(run, complete=True)


def test_attempt_by_hand_is_reproduced_by_the_first_command(config):
    run = rundir.create(config, PLAN, ARGV)
    number = rundir.next_attempt(run.path)
    env = json.loads((run.path / f"a{number}/env.json").read_text())
    assert (env["argv"], env["reproduce"]) == (None, "hires run parallel=sp")


def test_attempts_taken_at_once_are_distinct(config):
    run = rundir.create(config, PLAN, ARGV)
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: rundir.next_attempt(run.path), range(32)))
    assert sorted(numbers) == list(range(1, 33))


def test_same_run_twice_at_once_is_refused(config):
    # Two equal runs at a time shared the machine, and the later end won the tables.
    run = rundir.create(config, PLAN, ARGV)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # hires"])
    try:
        host = socket.gethostname()
        records.event(run, 0, "launch_started", pid=other.pid, host=host)
        with pytest.raises(RunError, match=f"a0 .process {other.pid}"):
            rundir.create(config, PLAN, ARGV)
    finally:
        other.kill()
        other.wait()
    assert rundir.create(config, PLAN, ARGV).attempt == 1


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
    run = rundir.start_attempt(path, ARGV)
    assert (run.path, run.attempt, run.complete) == (path, 0, False)
    assert json.loads((run.attempt_dir / "env.json").read_text())["reproduce"] == (
        "hires run parallel=sp"
    )
    assert rundir.create(config, PLAN, ARGV).attempt == 1


def test_frozen_files_of_a_run_under_way_are_left_alone(config, monkeypatch):
    run = rundir.create(config, PLAN, ARGV)
    monkeypatch.setattr(rundir, "_running", lambda path: 7)
    rundir.freeze(config, {**PLAN, "verdict": "another"}, ARGV)
    assert records.read_plan(run) == PLAN
    with pytest.raises(RunError, match="process 7"):
        rundir.start_attempt(run.path, ARGV)


def test_done_attempts_are_those_that_ended_well(config):
    run = rundir.create(config, PLAN, ARGV)
    for state in ("failed", "done", "cancelled", "done"):
        folder = run.path / f"a{rundir.next_attempt(run.path, ARGV)}"
        (folder / "exit.json").write_text(json.dumps({"state": state}))
    (run.attempt_dir / "exit.json").write_text("{")
    assert rundir.done_attempts(run.path) == [2, 4]
