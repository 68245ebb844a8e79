"""``hires run`` goes from a command line to tables, starts nothing that cannot work, never runs a
point twice, and stops its ranks on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from hires.cli.planning import Planner, shapes_of
from hires.core.store import attempts
from tests.helpers.commands import SMALL
from tests.helpers.patience import until
from tests.helpers.run_folders import saved_with

pytestmark = pytest.mark.usefixtures("traced")


def only_run() -> Path:
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent


def test_run_ends_in_tables_on_screen_and_in_the_folder(hires, fake_ranks, monkeypatch):
    answer = hires("run", *SMALL, "parallel=sp", "data.classes=7")
    assert answer.code == 0, answer.err
    for told in ("Throughput", "Memory", "again: hires run model=resnet18"):
        assert told in answer.out
    assert "step 3/3" in answer.err
    run = only_run()
    names = {file.name for file in run.iterdir()}
    assert {"throughput.csv", "throughput.md", "memory.csv", "memory.md", "record.json"} <= names
    assert "\n  classes: 7\n" in (run / "config.yaml").read_text()  # as the data has
    assert hires("run", *SMALL, "parallel=sp", "data.classes=7", "--again").code == 0
    assert (run / "a1" / "exit.json").exists()
    monkeypatch.setattr("hires.cli.planning.Planner.plan", None)  # it is not planned again
    answer = hires("run", *SMALL, "parallel=sp", "data.classes=7", "--json")
    assert answer.code == 0
    assert "complete since an earlier time" in answer.err
    assert not (run / "a2").exists()
    record = json.loads(answer.out)
    assert record == json.loads((run / "record.json").read_text())
    assert (record["state"], record["world"], record["throughput"]["samples"]) == ("done", 2, 2)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["parallel=pp", "parallel.microbatches=3"], 3, "microbatches"),
        (["memory.limit=1MB"], 3, "memory.limit"),
        (["data=folder", "data.path=empty"], 2, "holds no sub-folders"),
        (["checkpoint.resume=elsewhere"], 2, "/elsewhere: it is no checkpoint"),
        (["launcher.port=PORT"], 2, "launcher.port=PORT is taken"),
        (["--after", "5"], 2, "--after is about Slurm jobs; add launcher=slurm"),
        (["results=empty/file"], 1, "results=FOLDER"),
    ],
)
def test_what_cannot_run_starts_nothing(hires, words, code, told):
    Path("empty").mkdir()
    Path("empty/file").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        answer = hires("run", *SMALL, *[word.replace("PORT", port) for word in words])
    assert (answer.code, told.replace("PORT", port) in answer.err) == (code, True), answer.err
    assert "Traceback" not in answer.err
    assert not Path("results").exists() or "port" in told  # which is tried at the start


def test_failing_rank_ends_with_1_shows_its_last_lines_and_is_tried_again(hires, fake_ranks):
    fake_ranks({"0": "hang", "1": "kill"})
    answer = hires("run", *SMALL, "parallel=sp", "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["state"] == "failed"
    assert "hires: the run failed: rank 1" in answer.err
    assert "last lines of rank 1" in answer.err
    assert "rank 1 is kill" in answer.err
    assert str(only_run() / "a0" / "logs") in answer.err
    fake_ranks({})
    assert hires("run", *SMALL, "parallel=sp").code == 0
    assert (only_run() / "a1").is_dir()


def test_point_that_another_command_began_while_it_was_planned_is_not_begun_again(
    hires, monkeypatch
):
    hires("run", *SMALL, "--dry-run")
    meant = Planner.plan

    def plan(planner, config):
        attempts.next_attempt(only_run())
        return meant(planner, config)

    monkeypatch.setattr(Planner, "plan", plan)
    answer = hires("run", *SMALL)
    assert answer.code == 1
    assert "was begun meanwhile, by another command, as attempt a0" in answer.err


def test_interrupt_stops_the_ranks_and_exits_130(hires, fake_ranks):
    fake_ranks({"0": "hang", "1": "deaf"})

    def interrupt_when_started():
        def have_started():
            events = [file.read_text() for file in Path("results").glob("*/*/a0/events.jsonl")]
            return events and events[0].count('"rank_started"') == 2

        until(have_started)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_started)
    thread.start()
    answer = hires("run", *SMALL, "parallel=sp")
    thread.join()
    assert answer.code == 130
    assert "hires: the run was cancelled" in answer.err
    assert json.loads((only_run() / "record.json").read_text())["state"] == "cancelled"


def test_dry_run_starts_nothing_and_an_attempt_by_hand_knows_what_makes_the_run(hires, fake_ranks):
    answer = hires("run", *SMALL, "--dry-run", "seed=7")
    run = only_run().absolute()
    assert answer.out.splitlines() == [str(run / "launch.sh")]
    assert not (run / "a0").exists()
    assert "no attempt was begun" in hires("status").out
    assert attempts.next_attempt(run) == 0
    env = json.loads((run / "a0" / "env.json").read_text())
    assert (env["argv"], env["reproduce"].split()[-1]) == (None, "seed=7")
    planned = json.loads((run / "planned.json").read_text())
    assert planned["argv"][-1] == "seed=7"
    assert planned["provenance"] == env["provenance"]


@pytest.fixture
def saved(graph, tmp_path):
    """Returns a function that makes a checkpoint of the traced network, with some shapes changed.

    A shape of None leaves the tensor out.
    """

    def make(**changed: list[int] | None) -> Path:
        shapes = {**shapes_of(graph), **changed}
        return saved_with({name: s for name, s in shapes.items() if s is not None}, tmp_path)

    return make


def test_checkpoint_of_another_network_is_refused_before_anything_starts(hires, graph, saved):
    first, second, *_ = shapes_of(graph)
    path = saved(**{first: [1, 2], second: None})
    for verb, code in (("run", 2), ("sweep", 1)):
        answer = hires(verb, *SMALL, f"checkpoint.resume={path}", "--json")
        assert answer.code == code
        words = " ".join((answer.err + answer.out).split())
        assert f"is of another network: {first} is [1, 2] there and" in words
        assert f"it has no {second}; use the model and model.classes of its run" in words
    assert not list(Path("results").glob("*/*/a0"))


def test_weights_are_part_of_the_run_by_their_contents(hires, fake_ranks, graph, tmp_path):
    words = (*SMALL, "task=infer")
    paths = [saved_with(shapes_of(graph), tmp_path / name) for name in "ab"]
    other = saved_with({**shapes_of(graph), next(iter(shapes_of(graph))): [1, 2]}, tmp_path / "c")
    refused = hires("run", *words, f"weights={other}")
    assert refused.code == 2
    assert f"weights={other} is of another network" in refused.err
    assert not Path("results").exists()
    assert hires("run", *words).code == 0
    answers = [hires("run", *words, f"weights={path}") for path in paths]
    assert [answer.code for answer in answers] == [0, 0]
    assert "complete since an earlier time" in answers[1].err  # the same numbers elsewhere
    assert len(list(Path("results/default").glob("resnet18-*"))) == 2
