"""Does ``parallel=auto`` run what ``hires plan --choose`` lists first, and say why?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from hires.cli.choosing import LayoutSearch, given_keys
from hires.core.errors import ConfigError
from hires.core.store.choice_file import read_choice
from hires.plan.simulation.machine_calibration import keep_calibration, this_machine
from tests.cli.conftest import SMALL
from tests.helpers.calibrations import CALIBRATION
from tests.helpers.small_plans import config_of, forked

pytestmark = pytest.mark.usefixtures("traced")


def best(hires, *words):
    answer = hires("plan", "--choose", *words, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)["options"][0]


def test_layouts_are_shown_best_first_with_what_limits_them(hires):
    answer = hires("plan", "--choose", *SMALL, "ranks=2")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Layouts of 2 ranks that fit, fastest first")
    assert "limited by" in answer.out
    assert "step times: " in answer.out
    assert "hires doctor --calibrate" in answer.out


def test_table_has_each_division_of_the_ranks_once(hires):
    words = (*SMALL, "ranks=2")
    options = json.loads(hires("plan", "--choose", *words, "--json").out)["options"]
    rows = hires("plan", "--choose", *words).out.split("\n\n")[1].splitlines()[2:]
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    shapes = {json.dumps([one["keys"][f"parallel.{name}"] for name in names]) for one in options}
    assert len([row for row in rows if row.split()[0].isdigit()]) == len(shapes)


def test_json_has_all_layouts_and_the_keys_that_make_them(hires):
    facts = json.loads(hires("plan", "--choose", *SMALL, "ranks=2", "--json").out)
    steps = [option["step_s"] for option in facts["options"]]
    assert steps == sorted(steps)
    assert facts["ranks"] == 2
    assert facts["options"][0]["memory_rehearsed"]
    assert {"compute", "messages", "bubble", "cores", "memory"} >= {
        option["limit"] for option in facts["options"]
    }


def test_auto_plans_the_first_of_the_list(hires):
    first = best(hires, *SMALL, "ranks=2")
    answer = hires("plan", *SMALL, "parallel=auto", "ranks=2", "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert facts["world"] == 2
    [note] = [f["text"] for f in facts["findings"] if "parallel=auto chose" in f["text"]]
    assert first["overrides"] in note


def test_frozen_run_keeps_the_choice_and_its_reasons(hires, tmp_path):
    words = (*SMALL, "parallel=auto", "ranks=2", f"results={tmp_path}/r")
    answer = hires("run", "--dry-run", *words)
    assert answer.code == 0, answer.err
    assert "note: parallel=auto chose " in answer.err
    [run] = Path(tmp_path, "r").glob("*/*/config.yaml")
    choice = read_choice(run.parent)
    assert choice is not None
    assert choice["options"][0]["overrides"] in answer.err
    assert "auto" not in run.parent.name
    # What makes it again has the keys: a later choice may be another one.
    again = json.loads((run.parent / "planned.json").read_text())["argv"]
    assert "parallel=auto" not in again
    assert "ranks=2" not in again
    assert set(choice["options"][0]["overrides"].split()) <= {*again}
    assert yaml.safe_load(run.read_text())["parallel"]["name"] != "auto"


def test_chosen_layout_has_the_folder_of_the_same_layout_that_is_given(hires, tmp_path):
    first = best(hires, *SMALL, "ranks=2")
    given = [word for word in first["overrides"].split() if word != "parallel=single"]
    folders = set()
    for words in (["parallel=auto", "ranks=2"], given):
        answer = hires("run", "--dry-run", *SMALL, *words, f"results={tmp_path}/r")
        assert answer.code == 0, answer.err
        folders |= {path.name for path in Path(tmp_path, "r").glob("*/*-*")}
    assert len(folders) == 1


def test_keys_that_are_given_stay(hires):
    words = (*SMALL, "ranks=2", "parallel.microbatches=2")
    answer = hires("plan", "--choose", *words, "--json")
    options = json.loads(answer.out)["options"]
    assert {option["keys"]["parallel.microbatches"] for option in options} == {2}


def test_recomputation_that_is_given_as_a_choice_stays(hires):
    words = (*SMALL, "ranks=2", "memory=recompute")
    options = json.loads(hires("plan", "--choose", *words, "--json").out)["options"]
    assert {option["keys"]["memory.checkpoint"] for option in options} == {"block"}


def test_layout_beside_auto_is_refused():
    with pytest.raises(ConfigError, match="parallel=sp is a layout, and one is to be chosen"):
        given_keys(["parallel=sp", "ranks=2"])
    assert given_keys(["parallel.tiles=[2,1]", "batch=4", "+parallel.stages=2"]) == [
        "parallel.stages",
        "parallel.tiles",
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--choose", "ranks=37", "batch=1", "parallel.tiles=[1,1]"], 3, "ranks=37 with the given"),
        (["--choose", "ranks=0"], 2, "ranks=0 must be at least 1"),
        (["--choose", "ranks=2", "memory.limit=1MiB"], 3, "no layout of ranks=2 fits"),
        (["--choose", "ranks=2", "parallel=sp"], 2, "leave it out"),
        (["--choose", "ranks=2", "--prove"], 2, "--prove shows the proof of one layout"),
        (["--choose", "ranks=2", "--nodes", "2"], 2, "use launcher=slurm"),
        (["parallel=sp", "ranks=3"], 2, "ranks=3, but the layout has 2"),
        (["parallel=auto", "parallel.objective=speed"], 2, "choose one of images_per_s"),
        (["--choose", "ranks=2", "cluster.name=ours"], 2, "has no numbers to predict step times"),
        (["--choose", "ranks=2", "cluster.tflop_per_s={fp33:1}"], 2, "fp33"),
    ],
)
def test_wrong_input_is_answered_with_the_value_and_the_remedy(hires, words, code, text):
    answer = hires("plan", *SMALL, *words)
    assert answer.code == code, answer.err
    assert text in answer.err


def test_calibration_of_another_machine_is_refused(hires, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HIRES_CACHE", "on")
    file = keep_calibration(dataclasses.replace(CALIBRATION, machine=this_machine()))
    file.write_text(json.dumps(CALIBRATION.to_dict()))
    answer = hires("plan", "--choose", *SMALL, "ranks=2")
    assert answer.code == 2
    assert "is of another machine or version: cpu a cpu (here " in answer.err
    assert "run hires doctor --calibrate" in answer.err


def test_largest_image_is_found_by_bisection(hires, monkeypatch):
    answer = hires("plan", "--largest", *SMALL, "ranks=1", "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert facts["image"][0] >= 32


def test_repeated_search_is_that_of_before(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")
    words = (*SMALL, "ranks=2", "seed=77")
    first, again = (json.loads(hires("plan", "--choose", *words, "--json").out) for _ in range(2))
    assert not first["kept"]
    assert again["kept"]
    assert again["options"] == first["options"]
    assert again["out"] == first["out"]
    other = json.loads(hires("plan", "--choose", *words, "memory.limit=9GiB", "--json").out)
    assert not other["kept"]


@pytest.mark.slow
def test_search_in_vain_is_that_of_before(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")
    words = (*SMALL, "ranks=2", "seed=78", "memory.limit=1MiB")
    first = hires("plan", "--choose", *words)
    monkeypatch.setattr("hires.cli.choosing.Chooser", None)  # it is not needed again
    again = hires("plan", "--choose", *words)
    assert (first.code, again.code) == (3, 3)
    assert again.err == first.err


def test_largest_image_of_impossible_ranks_gives_the_reason(hires):
    answer = hires("plan", "--largest", *SMALL, "ranks=37", "batch=1", "parallel.tiles=[1,1]")
    assert answer.code == 3
    assert "no layout of this network uses ranks=37" in answer.err


def test_single_sample_is_traced_of_a_users_network_only():
    class Tracer:
        def traced(self, config):
            traces.append(config.batch)
            return forked(config.batch, True)

    # A user's network may treat one sample differently; one of ours follows from two traces.
    for model, last in (("resnet18", [8, 4]), ("custom", [8, 4, 1])):
        traces = []
        config = config_of()
        config = dataclasses.replace(config, model=dataclasses.replace(config.model))
        config.model.name = model
        graph = LayoutSearch(Tracer())._graphs(config)(1)
        assert graph.input_shape[0] == 1
        assert traces == last
