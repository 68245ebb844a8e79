"""Does ``hires run`` go from a command line to tables, and never run what cannot work?"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from hires.cli.planning import shapes_of
from hires.cli.start_run import explain
from hires.core.store import records
from hires.core.store.rundir import open_run
from hires.launcher.interface import Outcome
from tests.cli.conftest import SMALL
from tests.helpers.patience import until
from tests.helpers.run_folders import begin, saved_with

pytestmark = pytest.mark.usefixtures("traced")


def only_run() -> Path:
    [config] = Path("results").glob("*/*/config.yaml")
    return config.parent


def test_run_ends_in_two_tables_on_screen_and_in_the_folder(hires, fake_ranks):
    answer = hires("run", *SMALL, "parallel=sp")
    assert answer.code == 0, answer.err
    assert "Throughput" in answer.out
    assert "Memory" in answer.out
    assert "again: hires run model=resnet18" in answer.out
    assert "step 3/3" in answer.err
    names = {file.name for file in only_run().iterdir()}
    assert {"throughput.csv", "throughput.md", "memory.csv", "memory.md", "record.json"} <= names


def test_json_is_the_record_and_nothing_else(hires, fake_ranks):
    answer = hires("run", *SMALL, "parallel=sp", "--json")
    record = json.loads(answer.out)
    assert record == json.loads((only_run() / "record.json").read_text())
    assert (record["state"], record["world"], record["throughput"]["samples"]) == ("done", 2, 2)


def test_second_time_shows_the_run_without_tracing_it(hires, fake_ranks, monkeypatch):
    hires("run", *SMALL)
    monkeypatch.setattr("hires.cli.planning.Planner.plan", None)
    answer = hires("run", *SMALL)
    assert answer.code == 0
    assert "complete since an earlier time" in answer.err
    assert "Throughput" in answer.out
    assert not (only_run() / "a1").exists()


def test_again_runs_a_complete_run_anew(hires, fake_ranks):
    hires("run", *SMALL)
    assert hires("run", *SMALL, "--again").code == 0
    assert (only_run() / "a1" / "exit.json").exists()


def test_data_decides_the_classes_of_the_frozen_network(hires, fake_ranks):
    hires("run", *SMALL, "data.classes=7")
    assert "\n  classes: 7\n" in (only_run() / "config.yaml").read_text()


def test_fewer_outputs_than_classes_are_refused(hires):
    answer = hires("run", *SMALL, "data.classes=7", "model.classes=3")
    assert answer.code == 2
    assert "model.classes=3 is fewer than the 7 classes" in answer.err
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["batch=4", "parallel=pp", "parallel.microbatches=3"], "microbatches"),
        (["parallel=lp", "parallel.stages=999"], "parallel.stages"),
    ],
)
def test_infeasible_layout_exits_3_with_nothing_started(hires, words, key):
    answer = hires("run", *SMALL, *words)
    assert answer.code == 3
    assert key in answer.err
    assert answer.err.count("Traceback") == 0
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("path", "reason"), [("missing", "does not exist"), ("empty", "holds no sub-folders")]
)
def test_unusable_data_folder_exits_2_with_nothing_started(hires, path, reason):
    Path("empty").mkdir()
    answer = hires("run", *SMALL, "data=folder", f"data.path={path}")
    assert answer.code == 2
    assert reason in answer.err
    assert "data.path" in answer.err
    assert not Path("results").exists()


@pytest.mark.parametrize("behaviour", ["raise", "kill"])
def test_failing_rank_exits_1_and_shows_its_last_lines(hires, fake_ranks, behaviour):
    fake_ranks({"0": "hang", "1": behaviour})
    answer = hires("run", *SMALL, "parallel=sp")
    assert answer.code == 1
    assert "hires: the run failed: rank 1" in answer.err
    assert "last lines of rank 1" in answer.err
    assert f"rank 1 is {behaviour}" in answer.err
    assert str(only_run() / "a0" / "logs") in answer.err
    assert "Throughput" not in answer.out


def test_failed_run_is_tried_again_by_the_same_command(hires, fake_ranks):
    fake_ranks({"0": "exit 1"})
    assert hires("run", *SMALL).code == 1
    fake_ranks({})
    assert hires("run", *SMALL).code == 0
    assert (only_run() / "a1").is_dir()


@pytest.mark.parametrize("more", [(), ("--again",), ("--dry-run",), ("comm.timeout_s=7",)])
def test_run_that_another_machine_runs_is_left_alone(hires, fake_ranks, more):
    # Two machines with the same results began the same attempt's checkpoints anew.
    fake_ranks({"0": "exit 1"})
    hires("run", *SMALL)
    fake_ranks({})
    begin(only_run(), 1, host="another", boot="1", space="pid:[1]", pid=7)
    before = (only_run() / "config.yaml").read_bytes()
    answer = hires("run", *SMALL, *more)
    assert answer.code == 1
    assert "process 7 on another runs attempt a1" in answer.err
    assert (only_run() / "config.yaml").read_bytes() == before
    assert not (only_run() / "a2").exists()


def test_json_of_a_failed_run_holds_the_cause(hires, fake_ranks):
    fake_ranks({"0": "exit 1"})
    answer = hires("run", *SMALL, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["state"] == "failed"


def test_port_that_is_taken_is_named(hires, fake_ranks):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = hires("run", *SMALL, f"launcher.port={port}")
    assert answer.code == 2
    assert f"launcher.port={port} is taken" in answer.err


def test_results_below_a_file_are_refused(hires, fake_ranks):
    Path("results").write_text("a file")
    answer = hires("run", *SMALL)
    assert answer.code == 1
    assert "results=FOLDER" in answer.err
    assert answer.err.count("\n") <= 6


def test_show_prints_the_tables_of_a_run_by_its_hash(hires, fake_ranks):
    made = hires("run", *SMALL).out
    name = only_run().name
    answer = hires("show", name[-8:])
    assert answer.code == 0
    assert answer.out.startswith(f"{only_run().absolute()}, attempt a0: done\n")
    assert made in answer.out
    record = json.loads(hires("show", str(only_run()), "--json").out)
    assert record["run"] == name


def test_show_of_an_unknown_run(hires):
    answer = hires("show", "nope")
    assert answer.code == 2
    assert "there is no run 'nope'" in answer.err


def test_show_of_a_run_without_an_end(hires, fake_ranks):
    hires("run", *SMALL)
    (only_run() / "record.json").unlink()
    answer = hires("show", str(only_run()))
    assert answer.code == 1
    assert "has no record" in answer.err


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


def test_named_checkpoint_that_is_none_is_refused_before_anything_starts(hires, fake_ranks):
    answer = hires("run", *SMALL, "checkpoint.resume=elsewhere")
    assert answer.code == 2
    assert f"checkpoint.resume={Path.cwd() / 'elsewhere'}: it is no checkpoint" in answer.err
    assert not Path("results").exists()


@pytest.fixture
def saved(graph, tmp_path):
    """Returns a function that makes a checkpoint of the traced network, with some shapes changed.

    A shape of None leaves the tensor out.
    """

    def make(**changed: list[int] | None) -> Path:
        shapes = {**shapes_of(graph), **changed}
        return saved_with({name: s for name, s in shapes.items() if s is not None}, tmp_path)

    return make


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_checkpoint_of_another_network_is_refused_before_anything_starts(
    hires, fake_ranks, graph, saved, verb
):
    # Only the ranks found out, and an attempt that had failed was left behind.
    first, second, *_ = shapes_of(graph)
    path = saved(**{first: [1, 2], second: None})
    answer = hires(verb, *SMALL, f"checkpoint.resume={path}", "--json")
    assert answer.code == (2 if verb == "run" else 1)
    words = " ".join((answer.err + answer.out).split())
    assert f"is of another network: {first} is [1, 2] there and" in words
    assert f"it has no {second}; use the model and model.classes of its run" in words
    assert not list(Path("results").glob("*/*/a0"))


@pytest.mark.parametrize("damage", [False, True])
def test_checkpoint_of_the_same_network_is_taken(hires, fake_ranks, saved, damage):
    path = saved()
    if damage:  # the ranks say what is wrong with it
        file = path / "stage00.safetensors"
        file.write_bytes(b"\xff" * file.stat().st_size)
    answer = hires("run", *SMALL, f"checkpoint.resume={path}")
    assert answer.code == 0, answer.err


def test_checkpoints_that_went_wrong_are_told_on_screen(hires, fake_ranks, capsys):
    assert hires("run", *SMALL).code == 0
    run = open_run(only_run())
    records.event(run, 0, "checkpoint_failed", step=4, text="writing failed: no space")
    records.event(run, 0, "checkpoint_damaged", text="step000003 is damaged: torn")
    explain(Outcome("done", None, {}, [], None), run)
    assert capsys.readouterr().err == (
        "warning: no checkpoint of step 4: writing failed: no space\n"
        "warning: step000003 is damaged: torn\n"
    )


def test_network_of_the_run_whose_weights_do_not_fit_is_named(hires, fake_ranks, graph):
    assert hires("run", *SMALL, "model.depth=34").code == 0
    path = saved_with({next(iter(shapes_of(graph))): [1, 2]}, only_run())
    refused = hires("run", *SMALL, "task=infer", f"weights={path}")
    assert "is of another network" in refused.err
    assert "its run trained the network of model.depth=34;" in refused.err


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
