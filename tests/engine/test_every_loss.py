"""Can what trains be evaluated while it trains, evaluated and predicted, with every loss?"""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from torch.nn import functional as F

from hires.cli.data_keys import resolve_data
from hires.core.errors import ConfigError
from hires.core.losses import LOSSES
from hires.core.store import file_names
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, run_folder

pytestmark = pytest.mark.dist

UNET = {"model": {"name": "unet", "levels": 1, "width": 4}}
NET = {"model": {"name": "preact_resnet", "depth": 11}, "image": [32, 32]}


def one_score(*lost):
    """A loss of one score for two classes, of the user's."""
    output, labels = lost
    return F.softplus(output[:, 0] * (1 - 2 * labels)).mean()


def with_network(net, **keys):
    return {**net, "model": {**net["model"], **keys}}


CASES = {
    "masks, one score, bce": ("masks", with_network(UNET, classes=1), "bce"),
    "classes, one score, cross-entropy": ("folder", with_network(NET, classes=1), "cross_entropy"),
    "classes, one score, custom": ("folder", with_network(NET, classes=1), "custom"),
    "classes, two scores, dice": ("folder", NET, "dice"),
    "grey images, l2": ("pairs", with_network(UNET, channels=1, scale=1), "l2"),
    "grey images, smooth_l1": ("pairs", with_network(UNET, channels=1, scale=1), "smooth_l1"),
    "grey images, l1": ("pairs", with_network(UNET, channels=1, scale=1), "l1"),
    "edsr, auto": (
        "pairs",
        {"model": {"name": "edsr", "blocks": 1, "width": 4, "scale": 2}},
        "auto",
    ),
}


def files(root, data, channels):
    """Writes ten images of the kind."""
    random = np.random.default_rng(0)
    for number in range(10):
        pixels = random.integers(0, 255, (32, 32, 3), np.uint8)
        if data == "masks":
            folders = {"images": pixels, "masks": (pixels[..., 0] > 127).astype(np.uint8)}
        elif data == "folder":
            folders = {("cat", "dog")[number % 2]: pixels}
        else:
            folders = {"pairs": pixels[..., :channels]}
        for folder, values in folders.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.squeeze()).save(root / folder / f"{number}.png")
    return root


def folder_of(tmp_path, **keys):
    config = resolve_data(config_of(**keys))
    return config, run_folder(tmp_path / config.task.name, config)


@pytest.mark.parametrize("name", CASES)
def test_what_trains_is_evaluated_and_predicted(tmp_path, name):
    data, net, loss = CASES[name]
    channels = net["model"].get("channels", 3)
    target = {"target": f"{__name__}:one_score"} if loss == "custom" else {}
    keys = {
        **net, "image": [16, 16] if net["model"]["name"] == "edsr" else [32, 32],
        "batch": 2, "loss": {"name": loss, **target},
        "data": {"name": data, "path": str(files(tmp_path / "data", data, channels))},
    }  # fmt: skip
    keys["data"] |= {"classes": 2} if data == "masks" else {}
    keys["model"] = {"classes": None, **keys["model"]}
    _, train = folder_of(tmp_path, **keys, validate={"every": 2}, steps=4)
    assert attempt(train) == [0]
    last = json.loads((train / file_names.RECORD).read_text())["validation"]["last"]
    keys["data"]["split"] = "validation"
    _, evaluated = folder_of(tmp_path, **keys, task={"name": "evaluate"}, weights=str(train))
    _, predicted = folder_of(tmp_path, **keys, task={"name": "predict"}, weights=str(train))
    run_ranks(run_folders, 1, [str(evaluated), str(predicted)])
    found = json.loads((evaluated / "a0" / file_names.EVALUATION).read_text())
    shared = [key for key in ("top1", "psnr", "loss", "mean_iou") if key in found]
    assert [found[key] for key in shared] == pytest.approx([last[key] for key in shared])


def test_cases_have_every_loss():
    named = {loss for _, _, loss in CASES.values()}
    assert {*LOSSES} <= named


def test_one_score_cannot_tell_three_classes():
    keys = {"model": {"name": "unet", "classes": 1}, "data": {"classes": 3, "length": 8}}
    with pytest.raises(ConfigError, match=r"model\.classes=1"):
        plan_of(resolve_data(config_of(**keys, image=[32, 32]))).require_ok()
