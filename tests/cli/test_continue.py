"""Is a longer run offered to go on where a shorter one was saved, and does it?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hires.cli.planning import shapes_of
from hires.core.store import checkpoints, naming
from tests.cli.conftest import SMALL
from tests.helpers.run_folders import saved_stages

pytestmark = pytest.mark.usefixtures("traced", "fake_ranks")
BASE = tuple(word for word in SMALL if not word.startswith("steps="))


def run_of(steps: int) -> Path:
    [run] = [
        file.parent
        for file in Path("results").glob("default/*/config.yaml")
        if yaml.safe_load(file.read_text())["steps"] == steps
    ]
    return run


@pytest.fixture
def saved(hires, graph) -> Path:
    """A checkpoint of a run of three steps."""
    assert hires("run", *BASE, "steps=3").code == 0
    return saved_stages([dict(shapes_of(graph))], run_of(3).absolute(), 3)


def continues(run: Path) -> str | None:
    return yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["continues"]


def test_checkpoint_of_a_shorter_run_is_offered_and_used(hires, saved):
    answer = hires("run", *BASE, "steps=5", "--dry-run")
    offer = "was saved after step 3: --continue resumes there"
    assert f"note: {saved.parents[1].name} {offer}" in answer.err
    assert continues(run_of(5)) is None
    answer = hires("run", *BASE, "steps=5", "--continue")
    assert answer.code == 0, answer.err
    assert f"continues {saved.parents[1].name} after step 3" in answer.err
    assert continues(run_of(5)) == str(saved)
    assert naming.identity({"checkpoint": {"continues": "x"}}) == {}


def test_run_of_other_keys_or_fewer_steps_is_not_offered_it(hires, saved):
    for words in (("steps=5", "seed=1"), ("steps=3", "measure.warmup=0", "seed=2")):
        assert "with --continue" not in hires("run", *BASE, *words, "--dry-run").err
    answer = hires("run", *BASE, "steps=5", "seed=1", "--continue", "--dry-run")
    assert "nothing to continue" in answer.err
    assert answer.code == 0


def test_points_of_a_sweep_go_on_where_the_shorter_one_was_saved(hires, saved):
    answer = hires("sweep", *BASE, "steps=4,5", "--continue")
    assert answer.code == 0, answer.err
    assert [continues(run_of(steps)) for steps in (4, 5)] == [str(saved)] * 2


def test_notes_of_a_sweep_are_grouped_by_their_text(hires, saved):
    words = ("sweep", *BASE, "steps=4,5,6,7", "--dry-run")
    answer = hires(*words)
    [line] = [line for line in answer.err.splitlines() if "was saved after step 3" in line]
    assert line.startswith("note: 4 points: ")
    assert "more points" not in answer.err
    found = json.loads(hires(*words, "--json").out)["points"]
    assert ["was saved after step 3" in point["notes"][0] for point in found] == [True] * 4


def test_failed_run_is_retried_from_the_checkpoint_of_a_shorter_one(hires, saved, fake_ranks):
    fake_ranks({"0": "exit 3"})
    assert hires("run", *BASE, "steps=5").code == 1
    fake_ranks({})
    answer = hires("retry", "--continue")
    assert answer.code == 0, answer.err
    assert continues(run_of(5)) == str(saved)


def test_rest_that_the_warm_up_takes_is_named(hires, saved):
    words = ("1 step is left and measure.warmup=1 counts none of them", "steps=5")
    answer = hires("run", *BASE, "steps=4", "--continue", "--dry-run")
    assert all(word in answer.err for word in words), answer.err
    assert "counts none" not in hires("run", *BASE, "steps=5", "--continue", "--dry-run").err


def test_lineage_is_shown(hires, saved):
    hires("run", *BASE, "steps=5", "--continue")
    file = run_of(5) / "record.json"
    record = json.loads(file.read_text())
    record["lineage"] = [{"run": "short-0a", "step": 3}, {"run": "first-0b", "step": 1}]
    file.write_text(json.dumps(record))
    answer = hires("show", run_of(5).name)
    words = "it continues short-0a up to step 3, which continues first-0b up to step 1"
    assert words in answer.out


def test_run_that_differs_in_more_is_refused_before_its_folder_is_made(hires, saved):
    before = set(Path("results/default").iterdir())
    answer = hires("run", *BASE, "steps=5", "seed=1", f"checkpoint.continues={saved}")
    assert answer.code == 2
    assert f"checkpoint.continues={saved} is of a run that differs in more" in answer.err
    assert set(Path("results/default").iterdir()) == before


@pytest.mark.parametrize("steps", [3, 5])
def test_path_that_holds_no_checkpoint_is_refused(hires, saved, steps):
    (run_of(3) / "record.json").unlink()
    (saved / checkpoints.MANIFEST).unlink()  # its run folder is there, and it begins anew
    answer = hires("run", *BASE, f"steps={steps}", "checkpoint.continues=foo")
    assert answer.code == 2
    assert f"checkpoint.continues={Path('foo').absolute()}: it is no checkpoint" in answer.err


def test_named_run_is_continued_under_the_name_that_the_run_has_anyway(hires, saved):
    answer = hires("run", *BASE, "steps=5", f"checkpoint.continues={saved.parents[1]}")
    assert answer.code == 0, answer.err
    named = run_of(5)
    assert hires("run", *BASE, "steps=5", "--again", "--dry-run").code == 0
    assert run_of(5) == named


def test_contradicting_words_are_refused(hires, saved):
    answer = hires("run", *BASE, "steps=5", "checkpoint.resume=never", "--continue")
    assert answer.code == 2
    assert "--continue contradicts checkpoint.resume=never" in answer.err
