"""Does ``hires list runs`` list, filter and sort, whatever the folders hold?"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import yaml

from hires.core.store import run_index
from tests.helpers.compared_runs import compared_run, failed_run
from tests.helpers.run_folders import begin, make_run

RESULTS = Path("results")
STEPS = [0.5, 0.5, 0.5]


@pytest.fixture
def runs(hires):
    """A quick run, a slow one in bf16, a failed one and one that never began."""
    compared_run(RESULTS, [STEPS], batch=4, image=[64, 64])
    compared_run(RESULTS, [STEPS], batch=16, image=[96, 96], precision={"name": "bf16"})
    failed_run(RESULTS, "out of memory", campaign="other", image=[128, 96])
    make_run(RESULTS)


def listed(hires, *words):
    answer = hires("list", "runs", "--json", *words)
    assert answer.code == 0, answer.err
    return [(row["state"], row["image"]) for row in json.loads(answer.out)["runs"]]


SMALL, LARGE, FAILED, PENDING = (
    ("done", "64x64"), ("done", "96x96"), ("failed", "128x96"), ("pending", "64x64"),
)  # fmt: skip


@pytest.mark.usefixtures("runs")
class TestRuns:
    @pytest.mark.parametrize(
        ("where", "kept"),
        [
            ('precision == "bf16" and throughput > 10', [LARGE]),
            ("throughput > 10", [LARGE]),
            ("not (throughput > 10)", [PENDING, SMALL, FAILED]),
            ("throughput > 10 or state == 'failed'", [LARGE, FAILED]),
            ("throughput == null", [PENDING, FAILED]),
            ("throughput * 2 < 17 or 2 * throughput < 17", [SMALL]),
            ("image == 64 and state == 'done'", [SMALL]),
            ("height > width", [FAILED]),
            ("image == [128, 96]", [FAILED]),
            ("image == '128x96'", [FAILED]),
            ("image == '64x64' or image == [64, 64] and image != 65", [SMALL, PENDING]),
            ("image in ['64x64', 7] and image < 65", [SMALL, PENDING]),
            ("parallel == 'single' and data.shuffle", [LARGE, SMALL, FAILED]),
            ("'memory' in cause", [FAILED]),
            ("'memory' not in cause", [PENDING, LARGE, SMALL]),
            ("state in ['failed', 'pending']", [PENDING, FAILED]),
            ("memory > 50000000 and loss < 3 and step_time == 0.5", [LARGE, SMALL]),
            ("host == 'node1' and batch // 4 == 4", [LARGE]),
            ("parallel.stages == 1 and campaign == 'other'", [FAILED]),
        ],
    )
    def test_where(self, hires, where, kept):
        assert sorted(listed(hires, "--where", where)) == sorted(kept)

    @pytest.mark.parametrize(
        ("where", "told"),
        [
            ("troughput > 10", "did you mean throughput"),
            ("throughput", "neither true nor false"),
            ("state > 3", "cannot be worked out"),
            ("__import__('os').system('touch made')", "holds"),
            ("state.__class__ == 1", "unknown key"),
            ("(1).real == 1", "holds"),
        ],
    )
    def test_mistakes_in_where(self, hires, where, told):
        answer = hires("list", "runs", "--where", where)
        assert (answer.code, answer.out) == (2, "")
        assert told in answer.err
        assert not Path("made").exists()

    def test_rows_of_which_it_makes_no_sense_are_left_out_with_a_note(self, hires):
        answer = hires("list", "runs", "--json", "--where", "image < 100")
        assert [row["image"] for row in json.loads(answer.out)["runs"]] != []
        assert "--where: 1 runs left out" in answer.err

    def test_sort_puts_unknown_last(self, hires):
        assert listed(hires, "--sort", "throughput")[:2] == [SMALL, LARGE]
        assert listed(hires, "--sort=-throughput")[:2] == [LARGE, SMALL]
        assert listed(hires, "--sort", "batch", "--campaign", "other") == [FAILED]
        answer = hires("list", "runs", "--sort", "speeed")
        assert (answer.code, "is no name of a run" in answer.err) == (2, True)

    def test_table_and_csv(self, hires):
        table = hires("list", "runs").out
        assert table.startswith("4 runs\n")
        assert "bf16" in table
        rows = list(csv.DictReader(io.StringIO(hires("list", "runs", "--csv").out)))
        assert {row["state"] for row in rows} == {"done", "failed", "pending"}
        assert hires("list", "runs", "--csv", "--json").code == 2

    def test_index_is_written_and_then_used(self, hires):
        before = listed(hires)
        answer = hires("list", "runs")
        assert "3 runs that have ended are not in the index" in answer.err
        assert hires("index").out == "results/index.jsonl: 3 attempts of 4 runs\n"
        answer = hires("list", "runs")
        assert answer.err == ""
        assert listed(hires) == before
        assert json.loads(hires("index", "--json").out)["attempts"] == 3
        lines = (RESULTS / run_index.FILE).read_text().splitlines()
        assert len(lines) == 3


def test_running_and_lost_runs_are_told_apart(hires):
    run = make_run(RESULTS)
    begin(run)
    assert listed(hires) == [("running", "64x64")]
    begin(run, 1, pid=2**22 + 1, process_started=1)
    assert listed(hires) == [("lost", "64x64")]


def test_nothing_to_list(hires):
    assert hires("list", "runs").out == "no runs\n"
    assert hires("index").code == 2
    assert hires("list", "runs", "--campaign", "x").code == 2


def test_options_of_runs_are_for_runs(hires):
    answer = hires("list", "model", "--where", "batch > 3")
    assert (answer.code, "hires list runs --where" in answer.err) == (2, True)


def test_hostile_folder_costs_its_own_row_only(hires):
    run = compared_run(RESULTS, [STEPS])
    other = compared_run(RESULTS, [STEPS], seed=1)
    (other / "config.yaml").write_text("image: !!python/object:os.system {}\n" + "\0")
    (other / "record.json").write_text("[" * 100000)
    answer = hires("list", "runs", "--where", "image == 224 or state != 'x'")
    assert answer.code == 0
    assert run.name.rpartition("-")[2] in answer.out
    assert "\x00" not in answer.out + answer.err


def test_run_that_never_began_has_the_model_that_its_record_will_name(hires):
    made = make_run(RESULTS)
    compared_run(RESULTS, [STEPS], batch=32, model={"name": "resnet", "depth": 18})
    for config, model in (({}, "resnet18"), ({"name": "preact_resnet", "n": 2}, "preact_resnet20")):
        path = made / "config.yaml"
        values = yaml.safe_load(path.read_text())
        values["model"] |= {"depth": 18, **config}
        path.write_text(yaml.safe_dump(values))
        assert ("pending", "64x64") in listed(hires, "--where", f'model == "{model}"')
    values["model"]["of_another_hires"] = 1
    path.write_text(yaml.safe_dump(values))
    assert listed(hires, "--where", 'model == "preact_resnet"') == [("pending", "64x64")]
