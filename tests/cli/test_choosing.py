"""``parallel=auto`` runs what ``hires plan --choose`` lists first and says why; what was searched
before is kept, and nothing stale answers."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hires.cli.choosing import explicit, given_keys, given_values
from hires.core.errors import ConfigError
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


def test_auto_runs_the_first_of_the_list_under_its_own_name(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")  # two searches of a busy machine may differ
    facts = choose(hires, "ranks=2")
    options = facts["options"]
    steps = [option["step_s"] for option in options]
    assert (steps, facts["ranks"], facts["kept"]) == (sorted(steps), 2, False)
    assert options[0]["rehearsed"]
    limits = {"compute", "messages", "bubble", "cores", "memory"}
    assert limits >= {option["limit"] for option in options}
    shown = hires("plan", "--choose", *SMALL, "ranks=2").out
    assert shown.startswith("Layouts of 2 ranks that fit, fastest first")
    rows = shown.split("\n\n")[1].splitlines()[2:]
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    shapes = {json.dumps([one["keys"][f"parallel.{name}"] for name in names]) for one in options}
    assert len([row for row in rows if row.split()[0].isdigit()]) == len(shapes)
    assert rows[0].endswith(options[0]["overrides"])
    least = hires("plan", "--choose", *SMALL, "ranks=2", "parallel.objective=memory").out
    assert least.startswith("Layouts of 2 ranks that fit, least memory first")
    # A repeated search is that of before as long as nothing has changed.
    again = choose(hires, "ranks=2")
    assert (again["kept"], again["options"], again["out"]) == (True, options, facts["out"])
    first = options[0]["overrides"]
    answer = hires("run", "--dry-run", *SMALL, "parallel=auto", "ranks=2")
    assert answer.code == 0, answer.err
    assert f"note: parallel=auto chose {first}" in answer.err
    [run] = Path("results").glob("*/*/config.yaml")
    choice = json.loads((run.parent / "choice.json").read_text())
    assert choice is not None
    assert choice["options"][0]["overrides"] == first
    # What makes it again has the keys: a later choice may be another one.
    again = json.loads((run.parent / "planned.json").read_text())["argv"]
    assert not {"parallel=auto", "ranks=2"} & {*again}
    assert {*first.split()} - {"parallel=single"} <= {*again}
    assert yaml.safe_load(run.read_text())["parallel"]["name"] != "auto"


def test_search_of_other_keys_or_scales_is_another(hires, monkeypatch):
    monkeypatch.setenv("HIRES_CACHE", "on")
    options = choose(hires, "ranks=1", "seed=78", "memory.checkpoint=block")["options"]
    assert {option["keys"]["memory.checkpoint"] for option in options} == {"block"}
    # Other scales are another search: their file may have been written again, under the same name.
    kept = []
    for digest in ("a", "b", "b"):
        scales = SimpleNamespace(digest=digest)
        monkeypatch.setattr("hires.cli.planning.scales_of", lambda _, scales=scales: scales)
        int8 = ("ranks=1", "seed=80", "task=infer", "precision=int8")
        kept.append(choose(hires, *int8)["kept"])
    assert kept == [False, False, True]


def test_layout_beside_auto_is_refused_and_values_of_own_files_stay():
    with pytest.raises(ConfigError, match="parallel=sp is a layout, and one is to be chosen"):
        given_keys(["parallel=sp", "ranks=2"])
    found = given_keys(["parallel.tiles=[2,1]", "batch=4", "+parallel.stages=2", "parallel=auto"])
    assert found == ["parallel.stages", "parallel.tiles"]
    config = config_of()
    assert given_values(config, []) == {}
    shard = dataclasses.replace(config.optimizer, shard=True)
    own = dataclasses.replace(config, optimizer=shard)
    assert given_values(own, []) == {"optimizer.shard": True}
    option = SimpleNamespace(candidate=SimpleNamespace(overrides="parallel.replicas=2"))
    choice = Choice(2, "images_per_s", "", options=[option])
    argv = ["hires", "run", "memory=mine", "parallel=auto", "ranks=2", "batch=4"]
    words = explicit(argv, config_of(), choice)
    assert words == ["hires", "run", "memory=mine", "batch=4", "parallel.replicas=2"]
    largest = dataclasses.replace(choice, objective="image")
    words = explicit(["hires", "run", "image=64", "batch=4"], config_of(), largest)
    assert words == ["hires", "run", "batch=4", "image=[13,10]", "parallel.replicas=2"]


def test_wrong_input_is_answered_with_the_value_and_the_remedy(hires):
    for words, code, text in (
        (["ranks=37", "batch=1", "parallel.tiles=[1,1]"], 3, "ranks=37 with the given"),
        (["ranks=2", "parallel=sp"], 2, "leave it out"),
        (["ranks=2", "parallel.objective=image"], 2, "use --largest"),
        (["ranks=128", "batch=128"], 3, "use ranks=64, or allow them"),
    ):
        answer = hires("plan", "--choose", *SMALL, *words)
        assert (answer.code, text in answer.err) == (code, True), answer.err
    answer = hires("plan", *SMALL, "ranks=3", "parallel=dp")
    assert (answer.code, "ranks=3, but the layout has 2" in answer.err) == (2, True)


@pytest.mark.parametrize(("refuses", "edge", "side"), [(False, 1023, 992), (True, 1045, 704)])
def test_largest_image_is_found_by_bisection(hires, monkeypatch, refuses, edge, side):
    """The network takes 100 bytes for each pixel, and may refuse some sizes."""

    def network(config):
        if min(config.height, config.width) % 64 and refuses:
            raise ConfigError("a test's network halves its maps six times")
        graph = forked(max(1, config.batch // config.parallel.pieces), True)
        return dataclasses.replace(graph, input_shape=[*graph.input_shape[:2], *config.image])

    def memory(config, rank):
        return RankMemory(0, 0, 0, 100 * config.height * config.width, 0)

    monkeypatch.setattr("hires.cli.planning.TorchProcess", fake_torch(network, memory))
    monkeypatch.setenv("HIRES_CACHE", "off")
    size = "image=[128,64]" if refuses else "image=64"
    sized = (size, "ranks=1", "model.classes=5", "data.classes=5")
    words = ("plan", "--largest", *SMALL, *sized, f"memory.limit={100 * edge**2}B")
    if refuses:
        assert json.loads(hires(*words, "--json").out)["image"] == [2 * side, side]
        return
    text = hires(*words).out
    assert text.startswith(f"Largest image that fits 1 rank: {side}x{side}")
    assert f"image=[{side},{side}]" in text.splitlines()[-1]


def test_layout_that_does_not_fit_names_the_command_that_lists_those_that_do(hires):
    keys = (*SMALL, "memory.limit=900KiB", "results=a b")
    answer = hires("plan", *keys, "parallel=dp", "parallel.replicas=2")
    assert answer.code == 3
    [command] = re.findall(r"`hires (plan --choose .*?)`", " ".join(answer.out.split()))
    listed = hires(*shlex.split(command))
    assert (listed.code, listed) == (3, hires("plan", "--choose", "ranks=2", *keys))
