"""Every row of the table computes in float64 what one process computes, to 1e-10.

Compared are outputs, losses, gradients, parameters after a step of the optimiser, and buffers such
as running statistics; the one process runs the user's plain module with plain torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.core.config.fields import names_of
from hires.core.config.model_config import ModelConfig
from hires.core.losses import LOSSES
from hires.core.schedules import SCHEDULES
from tests.helpers.jobs import verify, verify_each
from tests.helpers.parity_rows import Row, groups, on_each, on_simulated, require_exact, rows
from tests.helpers.pool import POOL, SIMULATED

ROWS = rows()
GROUPS = groups(on_simulated())


@pytest.mark.dist
@pytest.mark.parametrize("row", on_each(ROWS))
def test_row_equals_one_process(row: Row, device: str, tmp_path: Path):
    _, config, plan, folder = row.given(tmp_path, device=device)
    answer = POOL.run(verify, plan["world"], config, plan, folder)[0]
    assert answer["ok"], answer["worst"]
    assert answer["max_rel_err"] < 1e-10, answer["worst"]


def in_one_process() -> dict[str, Row]:
    """The first row with tiles of each network that trains, all of its ranks in one process."""
    chosen: dict[str, Row] = {}
    for row in ROWS.values():
        config = row.config()
        trains = config.task.name == "train" and config.parallel.replicas == 1
        if trains and config.parallel.label == "sp" and config.parallel.resident == 1:
            chosen.setdefault(row.net, row)
    return chosen


@pytest.mark.dist
@pytest.mark.parametrize("row", in_one_process().values(), ids=in_one_process().keys())
def test_all_tiles_in_one_process_equal_the_whole_image(row: Row, tmp_path: Path):
    ranks = row.config().parallel.num_ranks
    keys = {"parallel": {"resident": ranks}, "comm": {"gradient_order": "auto"}}
    _, config, plan, folder = row.given(tmp_path, **keys)
    answer = POOL.run(verify, 1, config, plan, folder)[0]
    assert answer["max_rel_err"] < 1e-10, answer["worst"]


@pytest.mark.dist
@pytest.mark.parametrize("group", GROUPS)
def test_rows_equal_one_process_on_a_device_that_is_no_cpu(group: str, tmp_path: Path):
    layouts = [row.given(tmp_path, device="simulated") for row in GROUPS[group]]
    size = layouts[0][2]["world"]
    require_exact(SIMULATED.run(verify_each, size, layouts)[0], layouts)


def test_table_has_every_network_loss_and_schedule():
    configs = [row.config() for row in ROWS.values()]
    assert {config.model.name for config in configs} == {*names_of(ModelConfig)}
    assert {config.objective.name for config in configs} == {*LOSSES}
    assert {config.parallel.schedule for config in configs} == {*SCHEDULES}
    nets = {row.net for group in GROUPS.values() for row in group}
    nets |= {row.net for row in ROWS.values() if row.cpu_only}
    assert nets >= {row.net for row in ROWS.values() if "target" in row.keys.get("model", {})}
    assert {row.keys["model"]["target"] for row in ROWS.values() if row.cpu_only} == {
        "tests.helpers.mixing_nets:Panorama"
    }
