"""Does ``parallel=auto`` run what ``hires plan --choose`` lists first, and say why?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hires.cli.choosing import LayoutSearch, explicit, given_keys, given_values
from hires.core.errors import ConfigError
from hires.core.store.cache import sealed
from hires.core.store.choice_file import read_choice
from hires.plan.memory import RankMemory
from hires.plan.search.choice import Choice
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


WRONG_METRIC = "validate.every=1", "validate.metric=psnr", "data=digits"
"""Of evaluations of classes, which a search plans, too."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--choose", "ranks=37", "batch=1", "parallel.tiles=[1,1]"], 3, "ranks=37 with the given"),
        (["--choose", "ranks=0"], 2, "ranks=0 must be at least 1"),
        (["--choose", "ranks=2", "memory.limit=1MiB"], 3, "no layout of ranks=2 fits"),
        (["--choose", "ranks=2", "parallel=sp"], 2, "leave it out"),
        (["--choose", "ranks=2", "--prove"], 2, "--prove shows the proof of one layout"),
        (["--choose", "ranks=2", "parallel.objective=image"], 2, "use --largest"),
        (["--choose", "ranks=2", "--nodes", "2"], 2, "use launcher=slurm"),
        (["parallel=sp", "ranks=3"], 2, "ranks=3, but the layout has 2"),
        (["parallel=auto", "parallel.objective=speed"], 2, "choose one of images_per_s"),
        (["--choose", "ranks=2", "cluster.name=ours"], 2, "has no numbers to predict step times"),
        (["--choose", "ranks=2", "cluster.tflop_per_s={fp33:1}"], 2, "fp33"),
        (
            ["--choose", "ranks=128", "batch=128"],
            3,
            "use ranks=64, or allow them",
        ),
        (["--choose", "ranks=2", "launcher=slurm", "--nodes", "4"], 3, "launcher.nodes=4 is more"),
        (["--choose", "launcher=slurm"], 2, "ranks is unset, and nothing says what a node of"),
        (["--choose", "--largest", "ranks=2"], 2, "--largest looks for a size"),
        (["--largest", "ranks=2", "parallel.objective=memory"], 2, "leave it out"),
        (["--choose", "ranks=2", *WRONG_METRIC], 3, "can run: validate.metric=psnr is no number"),
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
    file.write_text(sealed(CALIBRATION.to_dict(), file.name))
    answer = hires("plan", "--choose", *SMALL, "ranks=2")
    assert answer.code == 2
    assert "is of another machine or version: cpu a cpu (here " in answer.err
    assert "run hires doctor --calibrate" in answer.err


SIZED = ("image=64", "ranks=1", "model.classes=5", "data.classes=5")
SIZED += (f"memory.limit={100 * 1023**2}B",)
"""Of :func:`of_any_size`, with the memory that it takes for an image of 1023x1023."""


@pytest.fixture
def of_any_size(monkeypatch):
    """The verbs get a network that takes 100 bytes for each pixel, and may refuse some sizes."""

    class Process(contextlib.nullcontext):
        def trace(self, config):
            if min(config.height, config.width) % 64 and self.refuses:
                raise ConfigError("a test's network halves its maps six times")
            graph = forked(max(1, config.batch // config.parallel.pieces), True)
            return dataclasses.replace(graph, input_shape=[*graph.input_shape[:2], *config.image])

        def footprint(self, config, plan):
            need = RankMemory(0, 0, 0, 100 * config.height * config.width, 0)
            return [need.to_dict()] * plan.ranks_per_replica

        def start(self):
            pass

        def __enter__(self):
            return self

    Process.refuses = False
    monkeypatch.setattr("hires.cli.planning.TorchProcess", Process)
    monkeypatch.setenv("HIRES_CACHE", "off")
    return Process


@pytest.mark.parametrize(("refuses", "side"), [(False, 992), (True, 960)])
def test_largest_image_is_found_by_bisection(hires, of_any_size, refuses, side):
    of_any_size.refuses = refuses
    words = (*SMALL, *SIZED)
    answer = hires("plan", "--largest", *words, "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["image"] == [side, side]
    text = hires("plan", "--largest", *words)
    assert text.out.startswith(f"Largest image that fits 1 rank: {side}x{side}")
    assert f"image=[{side},{side}]" in text.out.splitlines()[-1]


def test_size_that_is_refused_at_first_is_no_end(hires, of_any_size):
    """224 and its halves are no multiples of 64, and neither was any size that was tried."""
    of_any_size.refuses = True
    words = (*SMALL, *SIZED, "image=224")
    answer = hires("plan", "--largest", *words)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Largest image that fits 1 rank: 960x960\nlarger ones that were")
    assert "halves its maps six times" in answer.out


def test_auto_runs_the_largest_image_with_its_keys(hires, of_any_size, tmp_path):
    words = (*SMALL, *SIZED)
    words += ("parallel=auto", "parallel.objective=image", f"results={tmp_path}/r")
    answer = hires("run", "--dry-run", *words)
    assert answer.code == 0, answer.err
    [run] = Path(tmp_path, "r").glob("*/*/config.yaml")
    assert yaml.safe_load(run.read_text())["image"] == [992, 992]
    again = json.loads((run.parent / "planned.json").read_text())["argv"]
    assert "image=[992,992]" in again
    assert not {"image=64", "parallel=auto", "parallel.objective=image"} & {*again}


def test_auto_takes_the_layout_of_least_memory_if_that_is_the_objective(hires):
    words = (*SMALL, "ranks=2", "parallel.objective=memory")
    first = best(hires, *words)
    facts = json.loads(hires("plan", *words, "parallel=auto", "--json").out)
    [note] = [f["text"] for f in facts["findings"] if "parallel=auto chose" in f["text"]]
    assert f"chose {first['overrides']} among" in note
    assert "parallel.objective=memory" in note


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["parallel.spatial_stages=2", "ranks=4"], "parallel.spatial_stages", 2),
        (["parallel.balance=[10,11]", "ranks=2"], "parallel.balance", [10, 11]),
        (["parallel.pairs=4", "parallel.directions=2", "ranks=2"], "parallel.pairs", 4),
    ],
)
def test_keys_that_only_several_stages_have_may_be_given(hires, words, key, value):
    answer = hires("plan", "--choose", *SMALL, "batch=8", *words, "--json")
    assert answer.code == 0, answer.err
    assert [value] == [
        *{str(o["keys"][key]): o["keys"][key] for o in json.loads(answer.out)["options"]}.values()
    ]


def test_choices_of_other_keys_stay_in_the_command_of_a_run():
    choice = Choice(
        2, "images_per_s", "", options=[SimpleNamespace(overrides="parallel.replicas=2")]
    )
    argv = ["hires", "run", "memory=mine", "parallel=auto", "ranks=2", "batch=4"]
    words = explicit(argv, config_of(), choice)
    assert words == ["hires", "run", "memory=mine", "batch=4", "parallel.replicas=2"]


def test_backend_follows_from_the_layout_that_is_chosen(hires, monkeypatch):
    """Sixteen ranks on two nodes share eight GPUs, which NCCL refuses and gloo does not."""
    cluster = ("launcher=slurm", "cluster=a100x4", "--nodes", "2", "batch=16")
    few, many = (
        json.loads(hires("plan", "--choose", *SMALL, *cluster, f"ranks={ranks}", "--json").out)
        for ranks in (8, 16)
    )
    assert few["options"]
    assert all(option["waiting_for_cores"] == 0 for option in few["options"])
    assert max(option["waiting_for_cores"] for option in many["options"]) > 0


def test_repeated_search_in_8_bits_is_that_of_before(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")
    words = (*SMALL, "ranks=2", "seed=79", "task=infer", "precision=int8")
    first, again = (hires("plan", "--choose", *words, "--json") for _ in range(2))
    assert first.code == 0, first.err
    assert not json.loads(first.out)["kept"]
    assert json.loads(again.out)["kept"]


def test_other_scales_are_another_search(hires, monkeypatch):
    """Their file may have been made again, under the same name."""
    monkeypatch.setenv("HIRES_CACHE", "on")
    words = (*SMALL, "ranks=1", "seed=80", "task=infer", "precision=int8")
    kept = []
    for digest in ("a", "b", "b"):
        scales = SimpleNamespace(digest=digest)
        monkeypatch.setattr("hires.cli.choosing.scales_of", lambda _, found=scales: found)
        kept.append(json.loads(hires("plan", "--choose", *words, "--json").out)["kept"])
    assert kept == [False, False, True]


def test_values_of_a_users_own_files_stay():
    config = config_of()
    assert given_values(config, []).values == {}
    shard = dataclasses.replace(config.optimizer, shard=True)
    own = dataclasses.replace(config, optimizer=shard)
    assert given_values(own, []).values == {"optimizer.shard": True}


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
