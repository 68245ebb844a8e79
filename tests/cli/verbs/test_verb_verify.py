"""Does ``hires verify`` tell equal from unequal, and leave nothing behind?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hires.cli.choosing import LayoutSearch
from hires.launcher.local.local_launcher import Outcome
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.usefixtures("traced")

ERRORS = {"output": 1e-13, "loss": 2e-15, "gradients": 3e-12, "parameters": 1e-13}


@pytest.fixture
def rank_0_finds(monkeypatch):
    """Stands for the ranks: writes verify.json and remembers the frozen config."""
    seen = {}

    def finds(
        worst: float, noise: float | None = None, verdict: str | None = None, **more: float | None
    ):
        def launch(path, attempt, *, args, on_line):
            assert args == ("--verify",)
            seen["path"] = path
            seen["config"] = yaml.safe_load((path / "config.yaml").read_text())
            errors = {**ERRORS, "gradients": worst, **more}
            allowed = max(1e-10, min(10 * (noise or 0), 1e-6))
            each = {}
            for kind, error in errors.items():
                facts = {"name": f"{kind}/a", "error": error, "noise": noise, "allowed": allowed}
                facts["bound"] = 1e-10
                facts |= {"ok": error is None or error <= allowed, "undecided": verdict is not None}
                each[kind] = None if error is None else facts
            equal = "equal" if worst <= allowed else "not equal"
            answer = {"ok": worst <= allowed, "max_rel_err": worst, "errors": errors}
            answer |= {"verdict": verdict or equal, "decisive": each["gradients"]}
            answer |= {"worst": each, "by_noise": ["gradients/a"] if noise else []}
            answer |= {"lost": [], "precision": seen["config"]["precision"]["name"]}
            (path / f"a{attempt}" / "verify.json").write_text(json.dumps(answer))
            code = 0 if answer["ok"] else 1
            state = "done" if answer["ok"] else "failed"
            return Outcome(state, None, {0: code}, [])

        monkeypatch.setattr("hires.launcher.kinds.this_machine.launch", launch)
        return seen

    return finds


def test_layout_is_chosen_with_the_runs_of_its_results(hires, rank_0_finds, monkeypatch):
    """Runs there refine the step times; a search in an empty folder may choose another layout."""
    rank_0_finds(3e-12)
    own, seen = LayoutSearch.chosen, []

    def chosen(self, config):
        seen.append(config.results)
        return own(self, config)

    monkeypatch.setattr(LayoutSearch, "chosen", chosen)
    assert hires("verify", *SMALL, "parallel=sp", "results=mine").code == 0
    assert seen == ["mine"]
    assert not Path("mine").exists()


def test_equal_layout_exits_0(hires, rank_0_finds):
    seen = rank_0_finds(3e-12, running_stats=None)
    answer = hires("verify", *SMALL, "parallel=sp")
    assert answer.code == 0, answer.err
    assert "gradients" in answer.out
    assert "3.00e-12" in answer.out
    assert "running stats" in answer.out
    assert "equal to one process: 3.00e-12, allowed 1e-10" in answer.out
    assert seen["config"]["precision"]["name"] == "fp64"


def test_precision_that_is_named_is_verified(hires, rank_0_finds):
    seen = rank_0_finds(3e-12)
    answer = hires("verify", *SMALL, "parallel=sp", "precision=bf16", "comm.dtype=fp16")
    assert answer.code == 0, answer.err
    assert "equal to one process in float64, within what bf16 rounds" in answer.out
    assert seen["config"]["precision"]["name"] == "bf16"
    assert seen["config"]["comm"]["dtype"] == "fp16"


def test_unequal_layout_exits_1(hires, rank_0_finds):
    rank_0_finds(4e-3)
    answer = hires("verify", *SMALL, "parallel=sp")
    assert answer.code == 1
    assert "too large" in answer.out
    assert "NOT equal to one process: 4.00e-03, allowed 1e-10 (gradients/a)" in answer.out


def test_noise_of_float64_is_equal_and_named(hires, rank_0_finds):
    rank_0_finds(2e-9, noise=1e-9)
    answer = hires("verify", *SMALL, "parallel=sp")
    assert answer.code == 0
    assert "ok: noise" in answer.out
    assert "allowed ten times their float64 noise" in answer.out
    assert answer.out.rstrip().endswith("gradients/a")


def test_noise_above_the_limit_is_no_verdict_and_exits_2(hires, rank_0_finds):
    # A layout was "NOT equal" though its error was below the noise of float64 in the same table.
    rank_0_finds(3e-6, noise=8e-6, verdict="undecided")
    answer = hires("verify", *SMALL, "parallel=sp")
    assert answer.code == 2
    assert "undecided" in answer.out
    assert "cannot be decided: float64 itself differs by 8.00e-06 in gradients/a" in answer.out
    assert "at most 1e-06 is allowed" in answer.out
    assert "NOT equal" not in answer.out


def test_json_is_what_rank_0_wrote(hires, rank_0_finds):
    rank_0_finds(3e-12)
    answer = json.loads(hires("verify", *SMALL, "--json").out)
    assert answer["ok"] is True
    assert answer["max_rel_err"] == 3e-12


def test_no_folder_stays(hires, rank_0_finds):
    seen = rank_0_finds(3e-12)
    hires("verify", *SMALL)
    assert not seen["path"].exists()
    assert not Path("results").exists()


def test_failing_rank_is_explained(hires, fake_ranks):
    fake_ranks({"0": "raise"})
    answer = hires("verify", *SMALL)
    assert answer.code == 1
    assert "rank 0" in answer.err
    assert "this rank was told to fail" in answer.err
    assert answer.out == ""


def test_ranks_that_compare_nothing_are_no_success(hires, fake_ranks):
    answer = hires("verify", *SMALL)
    assert answer.code == 1
    assert "without comparing anything" in answer.err


def test_infeasible_layout_exits_3(hires):
    answer = hires("verify", *SMALL, "parallel=pp", "parallel.microbatches=3", "--json")
    assert answer.code == 3
    assert json.loads(answer.out)["error"]["exit_code"] == 3
