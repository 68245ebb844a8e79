"""Are gradients clipped by the norm that torch finds in one process, in every layout?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hires.core.errors import LossError
from hires.core.store import file_names
from hires.core.store.reading import read_lines
from tests.engine.test_loss_scale import STEEP
from tests.engine.test_optimizer_layouts import LAYOUTS, ids
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.plain_training import plain_training
from tests.helpers.saved import attempt, config_at, make, mean_losses

pytestmark = pytest.mark.dist

CASES: list[tuple[str, dict[str, Any]]] = [(layout, {}) for layout in LAYOUTS]
CASES += [("sp+gems", {"shard": True, "exchange": "broadcast"})]
CASES += [("dp", {"shard": True, "exchange": "scatter"})]


def norms(run: Path) -> dict[int, list[float | None]]:
    """Returns the norm of every step by rank."""
    found: dict[int, list[float | None]] = {}
    for line in read_lines(file_names.attempt_dir(run, 0) / "metrics.jsonl"):
        if line["kind"] == "step":
            found.setdefault(line["rank"], []).append(line.get("grad_norm"))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "update"), CASES, ids=ids)
def test_clipped_training_equals_that_of_torch(layout, update, tmp_path: Path):
    keys = {"optimizer": {"clip_norm": 0.7, "lr": 0.05, **update}, "steps": 4}
    run = make(tmp_path, **keys, **LAYOUTS[layout])
    assert set(attempt(run)) == {0}
    plain = plain_training(config_at(run))
    assert max(plain.norms) > 0.7  # or nothing was clipped
    own = norms(run)
    assert all(other == own[0] for other in own.values())
    assert own[0] == pytest.approx(plain.norms, rel=1e-10)
    assert mean_losses(run, 0) == pytest.approx(plain.losses, rel=1e-10)


@pytest.mark.parametrize("update", [{}, {"shard": True, "exchange": "scatter"}], ids=ids)
def test_clipped_step_is_verified(update, tmp_path: Path):
    keys = {"optimizer": {"clip_norm": 0.1, **update}, "parallel": {"replicas": 2}}
    answer = verified(tmp_path, **keys)
    assert answer["ok"], answer["worst"]
    assert answer["max_rel_err"] < 1e-10


def test_unscaled_gradients_of_fp16_are_clipped(tmp_path: Path):
    keys = {**STEEP, "optimizer": {"clip_norm": 0.5}, "parallel": {"tiles": [2, 1]}}
    run = make(tmp_path, **keys)
    assert attempt(run) == [0, 0]
    own = norms(run)[0]
    skipped = {step for step, norm in enumerate(own) if norm is None}
    plain = plain_training(config_at(run), skipped)
    assert 0 < len(skipped) < len(own)
    # Rounding as in test_loss_scale: the gradients are off by some per cent.
    for step, norm in enumerate(own):
        assert norm is None or norm == pytest.approx(plain.norms[step], rel=0.1)


def test_norm_that_is_no_number_ends_the_run(tmp_path: Path):
    keys = {"optimizer": {"clip_norm": 1.0, "lr": 1e200}, "parallel": {"stages": 2}}
    run = make(tmp_path, **keys)
    with pytest.raises((AssertionError, LossError), match=r"not finite|is (nan|inf) at step"):
        attempt(run)


def test_norm_is_a_message_of_the_plan_and_of_the_log(tmp_path: Path):
    keys: dict[str, Any] = {"optimizer": {"clip_norm": 1.0}, "parallel": {"tiles": [2, 1]}}
    plan = plan_of(config_of(**keys))
    assert plan.totals["by_kind"]["grad_norm"]["messages"] == 2
    run = make(tmp_path, **keys)
    assert attempt(run) == [0, 0]
    lines = read_lines(file_names.attempt_dir(run, 0) / "metrics.jsonl")
    rows = [row for line in lines if line["kind"] == "comm" for row in line["planned"]]
    assert [row["count"] for row in rows if row["kind"] == "grad_norm"] == [1, 1]
