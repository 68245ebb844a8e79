"""A longer run is offered to go on where a shorter one was saved, and does with ``--continue``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hires.cli.planning import shapes_of
from tests.helpers.commands import SMALL
from tests.helpers.run_folders import saved_stages

pytestmark = pytest.mark.usefixtures("traced", "fake_ranks")
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


def test_checkpoint_of_a_shorter_run_is_offered_used_and_shown(hires, saved):
    answer = hires("run", *BASE, "steps=5", "--dry-run")
    offer = "was saved after step 3: --continue resumes there"
    assert f"note: {saved.parents[1].name} {offer}" in answer.err
    assert continues(run_of(5)) is None
    answer = hires("run", *BASE, "steps=5", "--continue")
    assert answer.code == 0, answer.err
    assert f"continues {saved.parents[1].name} after step 3" in answer.err
    assert continues(run_of(5)) == str(saved)


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
