"""``hires weights`` shows, exports and imports weights, in the layout and numbers of plain torch,
and answers what does not fit with every name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from hires.cli.named_weights import path_of_weights, run_of_weights
from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import build_model
from tests.helpers.commands import SMALL
from tests.helpers.run_folders import make_run


def torchvision_resnet50(classes=1000):
    """Yields the names and shapes of torchvision's ResNet-50, written down from its layers."""

    def norm(name, width):
        for one in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{one}", [width]
        yield f"{name}.num_batches_tracked", []

    yield "conv1.weight", [64, 3, 7, 7]
    yield from norm("bn1", 64)
    width_in = 64
    for group, (count, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(count):
            name = f"layer{group}.{block}"
            yield f"{name}.conv1.weight", [width, width_in, 1, 1]
            yield from norm(f"{name}.bn1", width)
            yield f"{name}.conv2.weight", [width, width, 3, 3]
            yield from norm(f"{name}.bn2", width)
            yield f"{name}.conv3.weight", [4 * width, width, 1, 1]
            yield from norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield f"{name}.downsample.0.weight", [4 * width, width_in, 1, 1]
                yield from norm(f"{name}.downsample.1", 4 * width)
            width_in = 4 * width
    yield "fc.weight", [classes, 2048]
    yield "fc.bias", [classes]


def torchvision_weights():
    """Returns a state dict of torchvision's names, with numbers that leave signals as they are."""
    random, state = torch.Generator().manual_seed(0), {}
    for name, shape in torchvision_resnet50():
        kind = name.rpartition(".")[2]
        drawn = torch.randn(shape, generator=random)
        if kind == "num_batches_tracked":
            drawn = torch.tensor(100)
        elif kind == "running_var" or (kind == "weight" and len(shape) == 1):
            drawn = 0.5 + torch.rand(shape, generator=random)
            drawn *= 0.2 if name.endswith("bn3.weight") else 1  # sums of blocks stay as large
        elif len(shape) > 1:
            drawn *= (2 / np.prod(shape[1:])) ** 0.5 * (0.1 if name == "fc.weight" else 1)
        else:
            drawn *= 0.1
        state[name] = drawn
    return state


def plain_resnet50(state, x):
    """Returns the logits of torchvision's ResNet-50, whose stride is in its 3 x 3 convolutions."""

    def conv_norm(x, conv, norm, stride=1):
        weight = state[f"{conv}.weight"]
        x = functional.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
        numbers = (state[f"{norm}.{one}"] for one in ("running_mean", "running_var"))
        return functional.batch_norm(x, *numbers, state[f"{norm}.weight"], state[f"{norm}.bias"])

    x = functional.max_pool2d(conv_norm(x, "conv1", "bn1", 2).relu(), 3, 2, 1)
    for group, count in enumerate((3, 4, 6, 3), 1):
        for block in range(count):
            name, stride = f"layer{group}.{block}", 2 if group > 1 and block == 0 else 1
            y = conv_norm(x, f"{name}.conv1", f"{name}.bn1").relu()
            y = conv_norm(y, f"{name}.conv2", f"{name}.bn2", stride).relu()
            y = conv_norm(y, f"{name}.conv3", f"{name}.bn3")
            if block == 0:
                x = conv_norm(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
            x = (x + y).relu()
    return functional.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def test_weights_of_torchvisions_names_compute_as_in_plain_torch(hires):
    state = torchvision_weights()
    torch.save({f"module.{name}": one for name, one in state.items()}, "resnet50.pth")
    net = "model=resnet50", "model.classes=1000", "image=32"
    answer = hires("weights", "import", "resnet50.pth", "--out", "net.safetensors", *net)
    assert answer.code == 0, answer.err
    model = build_model(ModelConfig(depth=50, classes=1000), 0, (32, 32))
    model.load_state_dict(load_file("net.safetensors"), assign=True)
    model = model.double().eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        found = model(x).softmax(1)
    expected = plain_resnet50({name: one.double() for name, one in state.items()}, x).softmax(1)
    assert expected.max() < 0.9  # no class decides alone, so the comparison sees all logits
    assert (found - expected).abs().max() < 1e-10


def of_small(graph):
    names = {name for node in graph.nodes for name in node.params}
    shapes = {name: list(graph.params[name].shape) for name in sorted(names)}
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


def test_import_takes_away_what_wrappers_added(hires, graph):
    held = of_small(graph)
    torch.save({"state_dict": {f"module.{name}": one for name, one in held.items()}}, "w.pth")
    answer = hires("weights", "import", "w.pth", "--out", "net.safetensors", *SMALL[:2])
    assert answer.code == 0, answer.err
    written = load_file("net.safetensors")
    assert written.keys() == held.keys()
    assert all(torch.equal(written[name], held[name]) for name in held)
    shown = hires("weights", "show", "net.safetensors", *SMALL[:2])
    assert "; they fit the network" in shown.out


def test_other_names_and_another_head(hires, graph):
    held = {n.replace("layer1", "stem"): one for n, one in of_small(graph).items()}
    held |= {"fc.weight": torch.zeros(77, 512), "fc.bias": torch.zeros(77), "ema.x": torch.ones(1)}
    save_file(held, "w.safetensors")
    words = "weights", "import", "w.safetensors", "--out", "net.safetensors", *SMALL[:2]
    refused = hires(*words)
    assert refused.code == 2
    assert "it has no layer1.0.conv1.weight, layer1.0.bn1.weight, " in refused.err
    assert "of no layer: ema.x, stem.0.bn1.bias, " in refused.err
    assert "fc.weight is [77, 512] there and [10, 512] here" in refused.err
    assert not Path("net.safetensors").exists()
    options = "--rename", "stem=layer1", "--without", "ema", "--fresh", "fc", "--json"
    answer = hires(*words, *options)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["fresh"] == ["fc.weight", "fc.bias"]
    assert list(load_file("net.safetensors")["fc.weight"].shape) == [10, 512]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("bring w.safetensors", "unknown verb 'weights bring'"),
        ("show nothing.pt", "nothing.pt does not exist"),
        ("export w.safetensors", "name the file to write, as --out net.safetensors"),
        ("import w.safetensors --out a.pt --rename x", "--rename x must be OLD=NEW"),
        ("import cut.safetensors --out a.pt", "cut.safetensors is damaged"),
    ],
)
def test_wrong_words_are_answered_with_a_remedy(hires, words, text):
    save_file({"a": torch.zeros(4)}, "w.safetensors")
    Path("cut.safetensors").write_bytes(Path("w.safetensors").read_bytes()[:-4])
    answer = hires("weights", *words.split(), *(SMALL[:2] if "import" in words else ()))
    assert answer.code == 2
    assert text in answer.err
    assert not Path("a.pt").exists()


def test_weights_are_named_by_run_hash_step_and_kind(tmp_path):
    run = make_run(tmp_path / "results")
    last = run / "checkpoints" / "step000012"
    last.mkdir(parents=True)
    for name in ("", "/best", "/ema", "/best/ema", "/checkpoints/step000012"):
        found = path_of_weights(f"0123abcd{name}", tmp_path / "results")
        assert found == f"{run}{name}"
        assert run_of_weights(found) == run
    assert run_of_weights(f"{last}/ema") == run
    assert path_of_weights("net.safetensors", tmp_path) == "net.safetensors"
    assert run_of_weights(str(tmp_path / "net.safetensors")) is None


@pytest.mark.dist
def test_trained_weights_leave_and_come_back_in_another_layout(hires):
    net = "model=preact_resnet", "model.n=1", "model.channels=1", "image=16", "data=digits"
    train = "batch=4", "steps=3", "data.split=train", "checkpoint.at_end=always", "campaign=net"
    ran = hires("run", *net, *train, "parallel=sp+lp")
    assert ran.code == 0, ran.err
    [run] = map(str, Path("results").glob("net/*-*"))
    answer = hires("weights", "export", run, "--out", "net.safetensors")
    assert answer.code == 0, answer.err
    shares = []
    for weights, layout in ((run, "single"), ("net.safetensors", "sp")):
        predict = "data.split=validation", "data.validation=0.01", "predict.reduce=probability"
        keys = "task=predict", "batch=20", f"weights={weights}", f"parallel={layout}"
        ran = hires("run", *net, *predict, *keys, "measure.warmup=0", f"campaign={layout}")
        assert ran.code == 0, ran.err
        [table] = Path("results", layout).glob("*/a0/predictions.csv")
        rows = [*csv.DictReader(table.read_text().splitlines())]
        shares.append([[float(row[f"p_{digit}"]) for digit in range(10)] for row in rows])
    assert len(shares[0]) == 20
    assert np.allclose(*shares, rtol=0, atol=1e-5)
