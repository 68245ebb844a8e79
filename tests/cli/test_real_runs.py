"""One small training on real ranks, and what verbs make of it: export, evaluation, calibration,
comparison. Nothing is replaced by a stand-in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import commands

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
NET = ("model=unet", "model.levels=2", "model.width=4", "model.channels=1", "image=16")
DATA = ("data=digits", "data.validation=0.005")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training with evaluations and averaged weights; it is below results/net."""
    folder = tmp_path_factory.mktemp("trained")
    keys = ("batch=4", "steps=4", "validate.every=1", "augment.flip=both", "optimizer.ema=0.9")
    words = ("run", *NET, *DATA, *keys, "parallel=sp", "campaign=net")
    _, err = commands.hires(folder, *words)
    assert "trains with" not in err
    [run] = (folder / "results/net").iterdir()
    return run


@pytest.fixture
def run(trained: Path, hires, tmp_path: Path) -> Path:
    shutil.copytree(trained.parents[1], tmp_path / "results")
    return tmp_path / "results" / "net" / trained.name


def test_network_of_a_training_is_written_at_its_best(hires, run):
    # Keys of a training, as validate.every, were refused beside task=infer.
    best = f"/checkpoints/step{json.loads(next(run.glob('*/best.json')).read_text())['step']:06d}"
    written = {}
    for source in ("", "/best", "/best/ema", f"{best}/ema"):
        file = f"net{source.replace('/', '-')}.pt2"
        answer = hires("export", f"{run}{source}", "--to", "exported", "--out", file, "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["largest_error"] == 0.0
        weights = Path(file).with_suffix(".safetensors")
        answer = hires("weights", "export", f"net/{run.name}{source}", "--out", str(weights))
        assert answer.code == 0, answer.err
        written[source] = weights.read_bytes()
    assert written["/best"] != written["/best/ema"] == written[f"{best}/ema"]
    for out, told in (
        (".", "--out . is a folder; name a file, as --out net.onnx"),
        ("nb.pt2", "and this is --to onnx; use --out nb.onnx, or --to "),
    ):
        answer = hires("export", run.name, "--to", "onnx", "--out", out)
        assert (answer.code, told in answer.err) == (2, True)


def test_scales_are_those_of_the_weights_that_a_checkpoint_gives(hires, run):
    # They were those of the first weights of the seed.
    int8 = (
        *NET,
        "data=digits",
        "batch=4",
        "task=infer",
        "precision=int8",
        "quant.images=8",
        "steps=3",
    )
    first = hires("run", *int8, f"checkpoint.resume={run}", "parallel=sp")
    assert "calibrating on 8 images" in first.err, first.err
    second = hires("run", *int8, f"weights={run}")
    assert "reusing an earlier calibration" in second.err, second.err


def test_equal_runs_are_compared_as_equal(tmp_path):
    tiny = ("model=preact_resnet", "model.n=1", "image=32", "batch=4", "steps=3")

    def hires(*words: str, code: int | None = 0) -> str:
        return commands.hires(tmp_path, *words, code=code)[0]

    for campaign in ("before", "after"):
        hires("run", *tiny, "measure.warmup=1", "parallel=sp", f"campaign={campaign}")
    told = json.loads(hires("compare", "before", "after", "--metric", "loss", "--json"))
    assert [point["status"] for point in told["points"]] == ["same"]
    [tiled] = tmp_path.glob("results/before/*-sp-*")
    text = hires("show", str(tiled))
    assert "placement (ranks)\n  stage 0\n  [ 0 ]\n  [ 1 ]" in text
    assert "measured, step 2" in text
    line = hires("show", str(tiled), "--reproduce").splitlines()[0]
    assert line == f"hires run {' '.join(tiny)} measure.warmup=1 parallel=sp campaign=before"
