"""Does a campaign keep what every sweep planned?"""

from __future__ import annotations

import json

import pytest

from hires.core.errors import RunError
from hires.core.store import campaign
from hires.core.store.campaign import Campaign, ExcludedPoint, PlannedPoint


def test_reads_back_as_written(tmp_path):
    held = Campaign(tmp_path.name)
    words = ["data.path='it\\'s $(x);\n'", "image=64"]
    held.add(
        {"argv": ["hires"]},
        [PlannedPoint("a-1", words, 3)],
        [ExcludedPoint(["image=1"], "why", "image=2")],
    )
    campaign.write(tmp_path, held)
    assert campaign.read(tmp_path) == held
    assert [path.name for path in tmp_path.iterdir()] == ["campaign.json"]


def test_folder_without_a_sweep_is_an_empty_campaign(tmp_path):
    assert campaign.read(tmp_path / "none") == Campaign("none")


def test_later_sweep_adds_and_replaces():
    held = Campaign("sizes")
    held.add({}, [PlannedPoint("a-1", ["image=1"])], [ExcludedPoint(["image=2"], "too large")])
    held.add({}, [PlannedPoint("a-1", ["image=1"], 3), PlannedPoint("b-2", ["image=2"])], [])
    held.add({}, [], [ExcludedPoint(["image=3"], "too large")])
    assert held.points == [PlannedPoint("a-1", ["image=1"], 3), PlannedPoint("b-2", ["image=2"])]
    assert [point.overrides for point in held.excluded] == [["image=3"]]
    assert held.excluded[0].state == "infeasible"
    assert len(held.sweeps) == 3


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "points": [{"x": 1}]}'],
)
def test_damaged_file_is_named(tmp_path, text):
    (tmp_path / "campaign.json").write_text(text)
    with pytest.raises(RunError, match=r"campaign\.json cannot be read"):
        campaign.read(tmp_path)


@pytest.mark.parametrize("name", ["another", 7, None, ["a"]])
def test_name_is_that_of_the_folder_whatever_the_file_says(tmp_path, name):
    values = {"schema": 1, "campaign": name, "points": [], "excluded": [], "sweeps": []}
    (tmp_path / "campaign.json").write_text(json.dumps(values))
    for notes in (None, []):
        assert campaign.read(tmp_path, notes) == Campaign(tmp_path.name)


def test_file_of_another_schema_has_one_remedy(tmp_path):
    (tmp_path / "campaign.json").write_text('{"schema": 99}')
    with pytest.raises(RunError, match="its schema is 99, this hires reads 1") as caught:
        campaign.read(tmp_path)
    assert "move it away" in str(caught.value)
    assert "run the experiment again" not in str(caught.value)
