"""``hires run`` goes from a command line to tables, starts nothing that cannot work, never runs a
point twice, and stops its ranks on Ctrl-C."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from hires.cli.planning import Planner, shapes_of
from hires.core.store import attempts
from tests.helpers.commands import SMALL
from tests.helpers.run_folders import saved_stages, saved_with

pytestmark = pytest.mark.usefixtures("traced")


def only_run() -> Path:
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent


def test_run_ends_in_tables_on_screen_and_in_the_folder(hires, fake_ranks, monkeypatch):
    words = ("run", *SMALL, "parallel=sp", "data.classes=7")
    answer = hires(*words)
    assert answer.code == 0, answer.err
    for text in ("Throughput", "Memory", "again: hires run model=resnet18"):
        assert text in answer.out
    assert "step 3/3" in answer.err
    run = only_run()
    names = {file.name for file in run.iterdir()}
    assert {"throughput.csv", "throughput.md", "memory.csv", "memory.md", "record.json"} <= names
    assert "\n  classes: 7\n" in (run / "config.yaml").read_text()  # as the data has
    assert hires(*words, "--again").code == 0
    (run / "a1" / "exit.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("hires.launcher.status.running_elsewhere.is_alive", lambda _: False)
        assert hires(*words, "--again", "--dry-run").code == 0
    assert not (run / "a1" / "exit.json").exists()  # nothing begins, so nothing is ended
    monkeypatch.setattr("hires.cli.planning.Planner.plan", None)  # it is not planned again
    answer = hires(*words, "--json")
    assert (answer.code, "complete since an earlier time" in answer.err) == (0, True)
    assert not (run / "a2").exists()
    record = json.loads(answer.out)
    assert record == json.loads((run / "record.json").read_text())
    assert (record["state"], record["world"], record["throughput"]["samples"]) == ("done", 2, 2)
    config = run / "config.yaml"  # as of a run whose name has the same 8 digits
    config.write_text(config.read_text().replace("\nseed: 0\n", "\nseed: 1\n"))
    answer = hires(*words)
    assert (answer.code, "is not the config of this run" in answer.err) == (1, True)


def test_what_cannot_run_starts_nothing(hires):
    Path("empty").mkdir()
    Path("empty/file").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for words, code, text in (
            (["parallel=pp", "parallel.microbatches=3"], 3, "microbatches"),
            (["memory.limit=1MB"], 3, "memory.limit"),
            (["data=folder", "data.path=empty"], 2, "holds no sub-folders"),
            (["checkpoint.resume=elsewhere"], 2, "/elsewhere: it is no checkpoint"),
            (["--after", "5"], 2, "--after is about Slurm jobs; add launcher=slurm"),
            (["results=empty/file"], 1, "results=FOLDER"),
            ([f"launcher.port={port}"], 2, f"launcher.port={port} is taken"),
        ):
            assert not Path("results").exists()
            answer = hires("run", *SMALL, *words)
            assert (answer.code, text in answer.err) == (code, True), answer.err


@pytest.mark.parametrize("word", ["comm.backend=nccl", "measure.track=[wandb]", "device=cuda"])
def test_what_needs_no_torch_is_refused_before_anything_imports_it(hires, word, monkeypatch):
    monkeypatch.setattr("hires.core.trackers.find_spec", lambda package: None)
    monkeypatch.setattr("hires.launcher.ranks.spawn.warm", None)  # what imports it first
    monkeypatch.setattr("hires.plan.hardware.gpus_of_node", lambda config: 0)
    assert hires("run", *SMALL, word).code == 3


def test_point_that_another_command_began_while_it_was_planned_is_not_begun_again(
    hires, monkeypatch
):
    hires("run", *SMALL, "--dry-run")
    meant = Planner.plan

    def plan(planner, config, argv):
        attempts.next_attempt(only_run())
        return meant(planner, config, argv)

    monkeypatch.setattr(Planner, "plan", plan)
    answer = hires("run", *SMALL)
    assert answer.code == 1
    assert "was begun meanwhile, by another command, as attempt a0" in answer.err


def test_interrupt_stops_the_ranks_and_exits_130(hires, fake_ranks):
    fake_ranks({"0": "hang", "1": f"interrupt {os.getpid()}"})
    answer = hires("run", *SMALL, "parallel=sp")
    assert (answer.code, "hires: the run was cancelled" in answer.err) == (130, True)
    assert json.loads((only_run() / "record.json").read_text())["state"] == "cancelled"


def test_checkpoint_of_another_network_is_refused_before_anything_starts(hires, graph, tmp_path):
    shapes = {**shapes_of(graph)}
    first, second, *_ = shapes
    del shapes[second]
    path = saved_with({**shapes, first: [1, 2]}, tmp_path)
    for verb, code in (("run", 2), ("sweep", 1)):
        answer = hires(verb, *SMALL, f"checkpoint.resume={path}", "--json")
        assert answer.code == code
        words = " ".join((answer.err + answer.out).split())
        assert f"1 missing ({second}), 1 of another shape ({first} is [1, 2] there and" in words
        assert "; use the model and model.classes of its run" in words
    assert not list(Path("results").glob("*/*/a0"))


def test_weights_are_part_of_the_run_by_their_contents(hires, fake_ranks, graph, tmp_path):
    words = ("run", *SMALL, "task=infer")
    paths = [saved_with(shapes_of(graph), tmp_path / name) for name in "ab"]
    assert hires(*words).code == 0
    answers = [hires(*words, f"weights={path}") for path in paths]
    assert [answer.code for answer in answers] == [0, 0]
    assert "complete since an earlier time" in answers[1].err  # the same numbers elsewhere
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(graph).items()}
    save_file(zeros, tmp_path / "copy.safetensors", {"format": "pt"})
    answer = hires(*words, f"weights={tmp_path / 'copy.safetensors'}")
    assert "complete since an earlier time" in answer.err  # and as one file
    assert len(list(Path("results/default").glob("resnet18-*"))) == 2


BASE = tuple(word for word in SMALL if not word.startswith("steps="))


def run_of(steps: int) -> Path:
    """Returns the run of so many steps."""
    for file in Path("results").glob("default/*/config.yaml"):
        if yaml.safe_load(file.read_text())["steps"] == steps:
            return file.parent
    raise FileNotFoundError


def continues(run: Path) -> str | None:
    return yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["continues"]


@pytest.fixture
def saved(hires, graph) -> Path:
    """A checkpoint of a run of three steps."""
    assert hires("run", *BASE, "steps=3", "--dry-run").code == 0
    return saved_stages([dict(shapes_of(graph))], run_of(3).absolute(), 3)


def test_checkpoint_of_a_shorter_run_is_offered_used_and_shown(hires, saved, fake_ranks):
    answer = hires("run", *BASE, "steps=5", "--dry-run")
    offer = "was saved after step 3: --continue resumes there"
    assert f"note: {saved.parents[1].name} {offer}" in answer.err
    assert continues(run_of(5)) is None
    answer = hires("run", *BASE, "steps=5", "--continue")
    assert answer.code == 0, answer.err
    assert f"continues {saved.parents[1].name} after step 3" in answer.err
    assert continues(run_of(5)) == str(saved)


def test_run_that_was_stopped_says_where_it_goes_on(hires, saved):
    text = "note: this run continues after its step 3"
    assert text in hires("run", *BASE, "steps=3", "--dry-run").err
    assert text not in hires("run", *BASE, "steps=3", "checkpoint.resume=never", "--dry-run").err


def test_run_of_other_keys_or_no_more_steps_is_not_offered_it(hires, saved):
    for words in (("steps=5", "seed=1"), ("steps=2",)):
        answer = hires("run", *BASE, *words, "--continue", "--dry-run")
        assert (answer.code, "nothing to continue" in answer.err) == (0, True)
    # Nor is it offered a step at which nothing would be left: the one before is taken.
    hires("run", *BASE, "steps=6", "--dry-run")
    saved_stages([], run_of(6).absolute(), 4)
    answer = hires("run", *BASE, "steps=4", "--continue", "--dry-run")
    assert (answer.code, continues(run_of(4))) == (0, str(saved)), answer.err
    before = set(Path("results/default").iterdir())
    checkpoint = f"checkpoint.continues={saved}"
    for words, text in (
        (("seed=1", checkpoint), f"{checkpoint} is of a run that differs in more"),
        (("checkpoint.resume=never", "--continue"), "contradicts checkpoint.resume=never"),
    ):
        answer = hires("run", *BASE, "steps=5", *words)
        assert (answer.code, text in answer.err) == (2, True), answer.err
    assert set(Path("results/default").iterdir()) == before
