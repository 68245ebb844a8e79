"""Are results that another version of hires left listed with a note, and never a crash?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hires.core.store.naming import SCHEMA
from hires.report.tables import done_records
from tests.helpers.run_folders import begin, done, end, make_run

OLD = SCHEMA - 1


@pytest.fixture
def old(hires):
    """A run that is done, recorded in another shape, beside one of today."""
    run = make_run(Path("results"), "unet-64x64-single-fp32-99999999")
    begin(run)
    done(run)
    record = {"schema": OLD, "state": "done", "attempt": 0, "throughput": [41.5], "memory": "1 GiB"}
    (run / "record.json").write_text(json.dumps(record))
    (run / "a0" / "record.json").write_text(json.dumps(record))
    new = make_run(Path("results"))
    begin(new)
    done(new)
    return run


def test_status_lists_them_with_a_note(hires, old):
    answer = hires("status")
    assert answer.code == 0, answer.err
    [line] = [line for line in answer.out.splitlines() if line.startswith(old.name)]
    assert "done" in line
    assert f"its record is not read: it has schema {OLD} and this hires reads {SCHEMA}" in line
    assert "2 done" in answer.out


def test_show_says_why_there_are_no_tables(hires, old):
    answer = hires("show", "99999999")
    assert answer.code == 1
    assert f"it has schema {OLD} and this hires reads {SCHEMA}" in answer.err
    assert "run the experiment again" in answer.err


def test_tables_of_a_campaign_leave_them_out(old):
    assert done_records(old, 1) == []


def test_campaign_file_of_another_schema_hides_no_run(hires, old):
    file = old.parent / "campaign.json"
    file.write_text(json.dumps({"schema": OLD, "points": {"a": 1}, "excluded": ["image=7"]}))
    answer = hires("status")
    assert (answer.code, "2 done" in answer.out) == (0, True)
    answer = hires("sweep", "model=resnet18,resnet34", "image=32", "--dry-run", "--cfg", "job")
    assert answer.code == 0


def test_config_with_keys_of_another_hires_is_named_and_left_out_of_a_retry(hires, old):
    end(old / "a0", "failed")
    (old / "record.json").unlink()
    config = old / "config.yaml"
    config.write_text(config.read_text() + "zoom: 3\n")
    assert hires("status").code == 0
    answer = hires("retry", "99999999", "--set", "comm.timeout_s=9")
    assert answer.code == 1
    told = f"{config.absolute()} is of another hires, or was edited: unknown key zoom"
    assert f"hires: {old.name} is left out: {told}" in answer.err
