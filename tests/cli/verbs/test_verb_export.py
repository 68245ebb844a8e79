"""Does ``hires export`` write what other tools read?"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hires.report import mlflow_export
from hires.report.mlflow_export import TAG
from hires.report.read.runs import read_runs
from tests.helpers.compared_runs import compared_run, failed_run

RESULTS = Path("results")
STEPS = [0.5, 0.5, 0.25]


@pytest.fixture
def runs(hires):
    """Two attempts of a run, and a run that failed."""
    compared_run(RESULTS, [STEPS, STEPS], campaign="a")
    failed_run(RESULTS, "=cmd|' /C calc'!A0", campaign="b")


def rows(name):
    with Path("out", f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("runs")
def test_csv_holds_runs_attempts_steps_and_configs(hires):
    answer = hires("export", "--to", "csv", "--out", "out")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("2 runs, ")
    assert [row["state"] for row in rows("runs")] == ["done", "failed"]
    assert [float(row["step_s_median"]) for row in rows("attempts")] == [0.5, 0.5]
    assert [row["counted"] for row in rows("samples")] == ["no", "yes", "yes", "yes"] * 2
    assert rows("configs")[0]["parallel.tiles"] == "[1,1]"
    assert rows("failures")[0]["cause"].startswith("'=cmd")  # no formula in a spreadsheet


@pytest.mark.usefixtures("runs")
def test_some_runs_are_chosen_by_name(hires):
    assert hires("export", "--to", "csv", "--out", "out", "b").code == 0
    assert len(rows("runs")) == 1


@pytest.mark.parametrize(("names", "states"), [(["one"], None), (["a"], ["done", "pending"])])
def test_plan_of_a_campaign_is_written_if_all_of_its_runs_are(hires, names, states):
    first = compared_run(RESULTS, [STEPS], campaign="a")
    names = [first.name if name == "one" else name for name in names]
    compared_run(RESULTS, [STEPS], campaign="a", batch=8)
    points = [{"run": first.name, "overrides": ["x=1"]}, {"run": "later", "overrides": ["x=2"]}]
    plan = {"schema": 1, "points": points, "excluded": []}
    (RESULTS / "a" / "campaign.json").write_text(json.dumps(plan))
    assert hires("export", *names, "--to", "csv", "--out", "out").code == 0
    assert Path("out/planned.csv").exists() == (states is not None)
    if states:
        assert [row["state"] for row in rows("planned")] == states


def test_mlflow_is_asked_once_a_campaign_what_it_has(tmp_path, monkeypatch):
    # It was asked for all runs of the campaign once for every one of them.
    asked = []
    monkeypatch.setattr(mlflow_export, "_mlflow", Mock)
    monkeypatch.setattr(mlflow_export, "_write", lambda *words: None)
    monkeypatch.setattr(
        mlflow_export, "_experiment", lambda _, name: (asked.append(name) or name, set())
    )
    runs = [
        compared_run(tmp_path, [[0.5]], campaign=name, batch=n) for name in "ab" for n in (1, 2)
    ]
    assert mlflow_export.write_mlflow(read_runs(runs), tmp_path / "out") == (4, 0)
    assert asked == ["a", "b"]


@pytest.fixture
def mlflow_settings():
    """The variables that an export to mlflow sets, taken back after the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
            patch.setenv(name, "true")
        yield


@pytest.mark.usefixtures("runs", "mlflow_settings")
def test_mlflow_that_is_not_installed_is_named(hires, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    answer = hires("export", "--to", "mlflow", "--out", "out")
    assert answer.code == 2
    assert "pip install 'hires[mlflow]'" in answer.err
    assert not Path("out").exists()


def test_mistakes(hires):
    assert hires("export", "--to", "csv", "--out", "out").code == 2
    assert hires("export", "--out", "out").code == 2
    assert "--to csv writes a folder; name it, as --out" in hires("export", "--to", "csv").err
    answer = hires("export", "--to", "csb", "--out", "out")
    assert (answer.code, "did you mean csv" in answer.err) == (2, True)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is an extra")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("runs", "mlflow_settings")
def test_mlflow_finds_what_was_written(hires):
    words = ("export", "--to", "mlflow", "--out", "out")
    answer = hires(*words)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("2 complete attempts written")
    assert hires(*words).out.startswith("0 complete attempts written into out, 2 were there")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=Path("out").absolute().as_uri())
    held = client.search_runs([client.get_experiment_by_name("a").experiment_id])
    assert {run.data.tags[TAG].rpartition("/")[2] for run in held} == {"a0", "a1"}
    data = held[0].data
    assert data.params["parallel.tiles"] == "[1,1]"
    assert data.metrics["step_s_median"] == 0.5
    assert data.tags["hires.host"] == "node1"
    history = client.get_metric_history(held[0].info.run_id, "step_s")
    assert [(metric.step, metric.value) for metric in history] == [
        (0, 9.0), (1, 0.5), (2, 0.5), (3, 0.25),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.dist
def test_network_of_a_run_is_written_with_its_weights(hires):
    keys = "model=resnet18", "image=32", "data=digits", "model.channels=1", "batch=4", "steps=3"
    ran = hires("run", *keys, "parallel=lp", "checkpoint.every=3", "campaign=net")
    assert ran.code == 0, ran.err
    [run] = RESULTS.glob("net/*")
    answer = hires("export", run.name, "--to", "exported", "--out", "net.pt2", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["largest_error"] == 0.0
    assert Path("net.pt2").stat().st_size > 40e6  # 11.2 million parameters in fp32
    # Without --out the file is named by the run; it was an option that one had to give.
    answer = hires("export", f"{run}/", "--to", "exported")
    assert answer.code == 0, answer.err
    assert Path(f"{run.name}.pt2").stat().st_size > 40e6
    answer = hires("export", run.name, "--to", "onnx", "--out", ".")
    assert "--out . is a folder; name a file, as --out net.onnx" in answer.err
    for form, out, better in (("onnx", "nb.pt2", "nb.onnx"), ("exported", "nb.onnx", "nb.pt2")):
        answer = hires("export", run.name, "--to", form, "--out", out)
        assert answer.code == 2
        assert f"and this is --to {form}; use --out {better}, or --to " in answer.err
        assert not Path(out).exists()


@pytest.mark.slow
@pytest.mark.dist
def test_network_of_a_training_with_evaluations_is_written_at_its_best(hires):
    # Keys of a training, as validate.every, were refused beside task=infer.
    net = "model=unet", "model.levels=2", "model.width=4", "model.channels=1", "image=16"
    data = "data=digits", "data.validation=0.005", "augment.flip=both", "optimizer.ema=0.9"
    ran = hires("run", *net, *data, "batch=4", "steps=4", "validate.every=1", "campaign=net")
    assert ran.code == 0, ran.err
    [run] = RESULTS.glob("net/*")
    best = f"/checkpoints/step{json.loads(next(run.glob('*/best.json')).read_text())['step']:06d}"
    written = {}
    for source in ("", "/best", "/ema", "/best/ema", best, f"{best}/ema"):
        file = f"net{source.replace('/', '-')}.pt2"
        answer = hires("export", f"{run}{source}", "--to", "exported", "--out", file, "--json")
        assert answer.code == 0, answer.err
        facts = json.loads(answer.out)
        assert facts["largest_error"] == 0.0
        weights = Path(file).with_suffix(".safetensors")
        answer = hires("weights", "export", f"net/{run.name}{source}", "--out", str(weights))
        assert answer.code == 0, answer.err
        written[source] = weights.read_bytes()
    assert written["/best"] == written[best] != written[f"{best}/ema"] == written["/best/ema"]
    assert written[""] != written["/ema"]
    answer = hires("export", "net.safetensors", "--to", "exported", "--out", "out.pt2")
    assert answer.code == 2
    assert "net.safetensors is not of a run" in answer.err


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("names", "out", "text"),
    [
        ([], "net.onnx", "writes the network of one run, not 0; name one"),
        (["a", "b"], "net.onnx", "writes the network of one run, not 2"),
        (["a/*"], "net.onnx", "kept no weights; run it with checkpoint.at_end=always"),
    ],
)
def test_network_that_cannot_be_written_is_refused(hires, names, out, text):
    found = [str(next(RESULTS.glob(name))) if "*" in name else name for name in names]
    answer = hires("export", *found, "--to", "onnx", "--out", out)
    assert answer.code == 2
    assert text in answer.err
    assert not Path("net.onnx").exists()
