"""One small training on real ranks, and what verbs make of it: export, evaluation, calibration,
comparison. Nothing is replaced by a stand-in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import NET

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture
def run(trained: Path, hires, tmp_path: Path) -> Path:
    shutil.copytree(trained.parents[1], tmp_path / "results")
    return tmp_path / "results" / "net" / trained.name


def test_network_of_a_training_is_written_at_its_best(hires, run):
    # Keys of a training, as validate.every, were refused beside task=infer.
    answer = hires("export", f"{run}/best/ema", "--to", "exported", "--out", "net.pt2", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["largest_error"] == 0.0
    noted = json.loads(next(run.glob("*/best.json")).read_text())["values"]
    best = f"/checkpoints/step{noted['step']:06d}"
    written = []
    for source in ("/best", "/best/ema", f"{best}/ema"):
        words = "weights", "export", f"net/{run.name}{source}", "--out", "weights.safetensors"
        answer = hires(*words)
        assert answer.code == 0, answer.err
        written.append(Path(words[-1]).read_bytes())
    assert written[0] != written[1] == written[2]
    for out, text in (
        (".", "--out . must end in .onnx, as net.onnx"),
        ("nb.pt2", "--out nb.pt2 must end in .onnx, as net.onnx"),
    ):
        answer = hires("export", run.name, "--to", "onnx", "--out", out)
        assert (answer.code, text in answer.err) == (2, True)


def test_scales_are_those_of_the_weights_that_a_checkpoint_gives(hires, run):
    # They were those of the first weights of the seed.
    int8 = (*NET, "task=infer", "precision=int8", "quant.images=8", "steps=3")
    first = hires("run", *int8, f"checkpoint.resume={run}", "measure.warmup=1")
    assert "calibrating on 8 images" in first.err, first.err
    second = hires("run", *int8, f"weights={run}", "--dry-run")
    assert "reusing an earlier calibration" in second.err, second.err


def test_prediction_that_does_not_fit_is_computed_in_bands_that_fit(hires):
    net = ("model=unet", "model.levels=1", "model.width=8", "model.classes=10", "data=synthetic")
    words = ("plan", "task=predict", *net, "image=[1200,96]", "batch=1", "data.length=1", "--json")
    whole, bands = hires(*words), hires(*words, "memory.limit=14MB")
    plans = [json.loads(answer.out) for answer in (whole, bands)]
    # By the size of its maps alone a band would have all 1200 rows.
    assert plans[0]["band_rows"] == 0 < plans[1]["band_rows"] < 1200
    needs = [plan["memory"][0]["device_bytes"] for plan in plans]
    assert needs[1] < 14e6 < needs[0]
    texts = [finding["text"] for finding in plans[1]["findings"]]
    assert any(text.startswith("whole images need ") for text in texts)
