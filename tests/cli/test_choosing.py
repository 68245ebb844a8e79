"""``parallel=auto`` runs what ``hires plan --choose`` lists first and says why; what was searched
before is kept, and nothing stale answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hires.cli.choosing import explicit, given_keys, given_values
from hires.core.errors import ConfigError
from hires.core.store.choice_file import read_choice
from hires.plan.memory import RankMemory
from hires.plan.search.choice import Choice
from tests.helpers.commands import SMALL
from tests.helpers.fake_torch import fake_torch
from tests.helpers.small_plans import config_of, forked

pytestmark = pytest.mark.usefixtures("traced")


def choose(hires, *words):
    answer = hires("plan", "--choose", *SMALL, *words, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_layouts_are_listed_best_first_each_division_of_the_ranks_once(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")  # two searches of a busy machine may differ
    facts = choose(hires, "ranks=2")
    options = facts["options"]
    steps = [option["step_s"] for option in options]
    assert steps == sorted(steps)
    assert facts["ranks"] == 2
    assert options[0]["memory_rehearsed"]
    limits = {"compute", "messages", "bubble", "cores", "memory"}
    assert limits >= {option["limit"] for option in options}
    shown = hires("plan", "--choose", *SMALL, "ranks=2").out
    assert shown.startswith("Layouts of 2 ranks that fit, fastest first")
    for told in ("limited by", "step times: ", "hires doctor --calibrate"):
        assert told in shown
    rows = shown.split("\n\n")[1].splitlines()[2:]
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    shapes = {json.dumps([one["keys"][f"parallel.{name}"] for name in names]) for one in options}
    assert len([row for row in rows if row.split()[0].isdigit()]) == len(shapes)


def test_auto_runs_the_first_of_the_list_under_its_own_name(hires, tmp_path):
    first = choose(hires, "ranks=2")["options"][0]
    auto = (*SMALL, "parallel=auto", "ranks=2")
    facts = json.loads(hires("plan", *auto, "--json").out)
    assert facts["world"] == 2
    [note] = [f["text"] for f in facts["findings"] if "parallel=auto chose" in f["text"]]
    assert first["overrides"] in note
    given = [word for word in first["overrides"].split() if word != "parallel=single"]
    answer = hires("run", "--dry-run", *auto, f"results={tmp_path}/r")
    assert answer.code == 0, answer.err
    assert f"note: parallel=auto chose {first['overrides']}" in answer.err
    [run] = Path(tmp_path, "r").glob("*/*/config.yaml")
    choice = read_choice(run.parent)
    assert choice is not None
    assert choice["options"][0]["overrides"] == first["overrides"]
    # What makes it again has the keys: a later choice may be another one.
    again = json.loads((run.parent / "planned.json").read_text())["argv"]
    assert not {"parallel=auto", "ranks=2"} & {*again}
    assert {*given} <= {*again}
    assert yaml.safe_load(run.read_text())["parallel"]["name"] != "auto"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["memory.checkpoint=block", "ranks=2"], "memory.checkpoint", "block"),
        (["parallel.spatial_stages=2", "ranks=4", "batch=8"], "parallel.spatial_stages", 2),
    ],
)
def test_keys_that_are_given_stay(hires, words, key, value):
    options = choose(hires, *words)["options"]
    assert options
    assert all(option["keys"][key] == value for option in options)


def test_layout_beside_auto_is_refused_and_values_of_own_files_stay():
    with pytest.raises(ConfigError, match="parallel=sp is a layout, and one is to be chosen"):
        given_keys(["parallel=sp", "ranks=2"])
    found = given_keys(["parallel.tiles=[2,1]", "batch=4", "+parallel.stages=2", "parallel=auto"])
    assert found == ["parallel.stages", "parallel.tiles"]
    config = config_of()
    assert given_values(config, []).values == {}
    shard = dataclasses.replace(config.optimizer, shard=True)
    own = dataclasses.replace(config, optimizer=shard)
    assert given_values(own, []).values == {"optimizer.shard": True}
    option = SimpleNamespace(overrides="parallel.replicas=2")
    choice = Choice(2, "images_per_s", "", options=[option])
    argv = ["hires", "run", "memory=mine", "parallel=auto", "ranks=2", "batch=4"]
    words = explicit(argv, config_of(), choice)
    assert words == ["hires", "run", "memory=mine", "batch=4", "parallel.replicas=2"]


WRONG_METRIC = "validate.every=1", "validate.metric=psnr", "data=digits"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--choose", "ranks=37", "batch=1", "parallel.tiles=[1,1]"], 3, "ranks=37 with the given"),
        (["--choose", "ranks=2", "parallel=sp"], 2, "leave it out"),
        (["--choose", "ranks=2", "parallel.objective=image"], 2, "use --largest"),
        (["parallel=sp", "ranks=3"], 2, "ranks=3, but the layout has 2"),
        (["--choose", "ranks=128", "batch=128"], 3, "use ranks=64, or allow them"),
        (["--choose", "ranks=2", *WRONG_METRIC], 3, "can run: validate.metric=psnr is no number"),
    ],
)
def test_wrong_input_is_answered_with_the_value_and_the_remedy(hires, words, code, text):
    answer = hires("plan", *SMALL, *words)
    assert (answer.code, text in answer.err) == (code, True), answer.err


SIZED = ("image=64", "ranks=1", "model.classes=5", "data.classes=5")
SIZED += (f"memory.limit={100 * 1023**2}B",)


def of_any_size(refuses: bool):
    """Returns a process whose network takes 100 bytes for each pixel, and may refuse some sizes."""

    def network(config):
        if min(config.height, config.width) % 64 and refuses:
            raise ConfigError("a test's network halves its maps six times")
        graph = forked(max(1, config.batch // config.parallel.pieces), True)
        return dataclasses.replace(graph, input_shape=[*graph.input_shape[:2], *config.image])

    return fake_torch(
        network, lambda config, rank: RankMemory(0, 0, 0, 100 * config.height * config.width, 0)
    )


@pytest.mark.parametrize(("refuses", "side"), [(False, 992), (True, 960)])
def test_largest_image_is_found_by_bisection(hires, monkeypatch, refuses, side):
    monkeypatch.setattr("hires.cli.planning.TorchProcess", of_any_size(refuses))
    monkeypatch.setenv("HIRES_CACHE", "off")
    words = (*SMALL, *SIZED)
    answer = hires("plan", "--largest", *words, "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["image"] == [side, side]
    text = hires("plan", "--largest", *words)
    assert text.out.startswith(f"Largest image that fits 1 rank: {side}x{side}")
    assert f"image=[{side},{side}]" in text.out.splitlines()[-1]


def test_repeated_search_is_that_of_before_as_long_as_nothing_has_changed(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")
    first, again = (choose(hires, "ranks=2", "seed=77") for _ in range(2))
    assert (first["kept"], again["kept"]) == (False, True)
    assert (again["options"], again["out"]) == (first["options"], first["out"])
    assert not choose(hires, "ranks=2", "seed=77", "memory.limit=9GiB")["kept"]
    # A search in vain is kept, too.
    words = ("plan", "--choose", *SMALL, "ranks=2", "seed=78", "memory.limit=1MiB")
    vain = hires(*words)
    with monkeypatch.context() as patch:
        patch.setattr("hires.cli.choosing.Chooser", None)  # it is not needed again
        again = hires(*words)
    assert (vain.code, again.code, again.err) == (3, 3, vain.err)
    # Other scales are another search: their file may have been written again, under the same name.
    kept = []
    for digest in ("a", "b", "b"):
        scales = SimpleNamespace(digest=digest)
        monkeypatch.setattr("hires.cli.choosing.scales_of", lambda _, scales=scales: scales)
        int8 = ("ranks=1", "seed=80", "task=infer", "precision=int8")
        kept.append(choose(hires, *int8)["kept"])
    assert kept == [False, False, True]
