"""Are the numbers that TensorBoard shows those of the run's own lines, also of a resumed run?"""

from __future__ import annotations

import time

import pytest

from hires.cli.data_keys import with_classes
from hires.data.make_data import make_data
from hires.engine.epochs import FOLDER
from hires.plan import hardware
from tests.helpers.layouts import config_of
from tests.helpers.patience import until
from tests.helpers.saved import attempt, killed_attempt, lines_of, mean_losses, run_folder


def shown(path):
    """Returns name -> steps and numbers, as TensorBoard reads them."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs hires[tensorboard]"
    )
    events = accumulator.EventAccumulator(str(path / FOLDER))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in names}


@pytest.mark.dist
def test_numbers_are_those_of_the_metrics_and_end_at_the_checkpoint_of_a_killed_run(tmp_path):
    make_data("textures", tmp_path / "images", classes=1, count=6, size=[32, 32], seed=0)
    config = config_of(
        model={"name": "edsr", "blocks": 1, "width": 4, "scale": 2},
        data={"name": "pairs", "path": str(tmp_path / "images"), "validation": 0.34},
        image=[16, 16], steps=6, parallel={"tiles": [2, 1]}, checkpoint={"every": 2},
        measure={"tensorboard": True, "warmup": 0}, validate={"every": 2},
        optimizer={"clip_norm": 1.0}, lr_schedule={"name": "cosine"},
    )  # fmt: skip
    path = run_folder(tmp_path / "runs", with_classes(config))
    killed_attempt(path, 3)
    second = int(time.time())  # TensorBoard sorts files of one second by their processes
    until(lambda: int(time.time()) > second)
    assert attempt(path) == [0, 0]
    found, own = shown(path), [line for line in lines_of(path, 1, "step") if line["rank"] == 0]
    assert [step for step, _ in found["train/loss"]] == [0, 1, 2, 3, 4, 5]
    later = {name: [one for one in numbers if one[0] >= 2] for name, numbers in found.items()}
    wanted = [(step + 2, pytest.approx(loss)) for step, loss in enumerate(mean_losses(path, 1))]
    assert later["train/loss"] == wanted
    for key in ("lr", "grad_norm"):
        wanted = [(line["step"], pytest.approx(line[key])) for line in own]
        assert later[f"train/{key}"] == wanted
    wanted = [(line["step"], pytest.approx(2 / line["step_s"])) for line in own]
    assert later["train/images_per_s"] == wanted
    metrics = {"loss", "psnr", "ssim"}
    assert {name for name in found if "validation" in name} == {f"validation/{n}" for n in metrics}
    for metric in metrics:
        lines = lines_of(path, 1, "validated")
        wanted = [(line["step"], pytest.approx(line[metric])) for line in lines]
        assert later[f"validation/{metric}"] == wanted


def test_missing_package_is_named_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    [finding] = hardware.check_hardware(config_of(measure={"tensorboard": True}))
    assert "pip install 'hires[tensorboard]'" in finding.text
    assert not [*hardware.check_hardware(config_of())]
