"""Does ``hires bench parity`` draw rows that show everything, and tell the truth about them?"""

from __future__ import annotations

import json
import random

import pytest

from hires.bench.parity_bench import (
    BENCHMARK,
    CHOICES,
    NETWORKS,
    ParityOptions,
    check,
    config_of,
    draw,
    draw_rows,
    measure,
    overrides,
    settings_of,
)
from hires.cli.compose.compose_config import compose
from hires.core.config.run_config import RunConfig, to_dict
from hires.plan.route_choice import resolve
from tests.helpers.traces import plan_of


@pytest.fixture(autouse=True)
def inductor_folder(tmp_path, monkeypatch):
    """Torch sets this variable when it traces some networks, and it would outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def drawn(count: int, seed: int = 0) -> list[RunConfig]:
    """Returns rows whose plans nobody looks at."""
    return [config for _, config in draw_rows(count, seed, lambda config: config)]


def layout(**values: object) -> dict[str, object]:
    return {f"parallel.{key}": value for key, value in values.items()}


def test_sixty_rows_show_every_value_of_every_key():
    shown = drawn(60)
    assert len(shown) == 60
    for name, network in NETWORKS.items():
        matching = [c for c in shown if all(getattr(c.model, k) == v for k, v in network.items())]
        assert matching, name
    assert {tuple(c.image) for c in shown} == set(map(tuple, CHOICES["image"]))
    assert {c.parallel.stages for c in shown} == set(CHOICES["parallel.stages"])
    assert {c.parallel.halo.fuse for c in shown} == set(CHOICES["parallel.halo.fuse"])
    assert {c.parallel.halo.overlap for c in shown} == set(CHOICES["parallel.halo.overlap"])
    assert {c.memory.checkpoint for c in shown} == set(CHOICES["memory.checkpoint"])
    for key in ("directions", "pairs", "local_dp", "replicas", "microbatches"):
        assert {getattr(c.parallel, key) for c in shown} == {1, 2}, key
    grids = {tuple(map(tuple, c.parallel.grids[: c.parallel.spatial_stages])) for c in shown}
    assert {((3, 3),), ((1, 2),), ((2, 2), (1, 2))} <= grids


def test_the_same_seed_draws_the_same_rows():
    assert drawn(8, 3) == drawn(8, 3)
    assert drawn(8, 3) != drawn(8, 4)


@pytest.mark.slow
def test_line_that_makes_a_row_again_makes_the_same_config():
    for settings, config in draw_rows(20, 0, lambda config: config):
        again = compose([*overrides(settings), "precision=fp64", "steps=3"])
        ours, theirs = to_dict(resolve(config)), to_dict(again)
        ours["parallel"].pop("name")
        theirs["parallel"].pop("name")
        assert theirs == ours


def test_layout_on_too_many_ranks_is_drawn_again():
    choice = draw(random.Random(0))
    choice |= layout(tiles=[3, 3], stages=4, local_dp=2, replicas=2)
    assert config_of(settings_of(choice, 0)) is None


@pytest.mark.dist
@pytest.mark.slow
def test_network_that_hires_does_not_know_is_equal_too():
    choice = draw(random.Random(0)) | {"network": "custom", "image": [25, 29]}
    choice |= layout(tiles=[2, 1], stages=3, directions=2, pairs=1, replicas=1)
    choice |= layout(microbatches=1, local_dp=1) | {"parallel.halo.fuse": 2, "task.name": "train"}
    settings = settings_of(choice, 0)
    config = config_of(settings)
    assert config is not None
    assert config.model.name == "custom"
    row = check(settings, plan_of(config), timeout_s=300)
    assert row["ok"], row
    assert row["max_rel_err"] <= 1e-10


@pytest.mark.dist
@pytest.mark.slow
def test_two_rows_run_and_are_equal(tmp_path):
    assert BENCHMARK.main(["--rows", "2", "--seed", "5", "--out", str(tmp_path / "parity")]) == 0
    found = json.loads((tmp_path / "parity" / "parity.json").read_text())
    assert found["ok"]
    assert all(row["max_rel_err"] <= 1e-10 for row in found["rows"])
    assert "2 of 2 rows are equal" in (tmp_path / "parity" / "README.md").read_text()


@pytest.mark.dist
@pytest.mark.slow
def test_row_that_fails_is_a_row_and_no_success():
    [result] = measure(ParityOptions(rows=1, seed=5, timeout=0.1))
    assert not result["ok"]
    assert "FAILED" in BENCHMARK.text(result)
