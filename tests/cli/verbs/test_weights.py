"""``hires weights`` shows, exports and imports weights, in the layout and numbers of plain torch,
and answers what does not fit with every name."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from hires.cli.data_keys import path_of_weights, run_of_weights
from hires.core.config.model_config import ModelConfig
from hires.nets.build_network import build_model
from tests.helpers.commands import SMALL
from tests.helpers.run_folders import make_run


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


def test_network_has_torchvisions_names_and_computes_as_in_plain_torch():
    model = build_model(ModelConfig(depth=50, classes=10), 0, (32, 32))
    random, state = torch.Generator().manual_seed(0), {}
    for name, tensor in model.state_dict().items():  # numbers that leave signals as they are
        drawn = torch.randn(tensor.shape, generator=random).double()
        if tensor.dim() > 1:
            drawn *= (2 / tensor[0].numel()) ** 0.5 * (0.1 if name == "fc.weight" else 1)
        elif name.endswith(("weight", "running_var")):
            drawn = (0.2 if "bn3.w" in name else 1) * (0.5 + drawn.sigmoid())
        state[name] = drawn if tensor.dtype.is_floating_point else torch.tensor(100)
    model.load_state_dict(state, assign=True)
    model.eval()
    x = torch.randn(2, 3, 32, 32, generator=random).double()
    with torch.no_grad():
        found = model(x).softmax(1)
    expected = plain_resnet50(state, x).softmax(1)
    assert expected.max() < 0.9  # no class decides alone, so the comparison sees all logits
    assert (found - expected).abs().max() < 1e-10


def of_small(graph):
    names = {name for node in graph.nodes for name in node.params}
    shapes = {name: list(graph.params[name].shape) for name in sorted(names)}
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


def test_import_takes_away_what_wrappers_added_and_renames(hires, graph):
    tensors, words = of_small(graph), ("--out", "net.safetensors", *SMALL[:2])
    torch.save({"state_dict": {f"module.{name}": one for name, one in tensors.items()}}, "w.pth")
    answer = hires("weights", "import", "w.pth", *words)
    assert answer.code == 0, answer.err
    written = load_file("net.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert "; they fit the network" in hires("weights", "show", *words[1:]).out
    other = {name.replace("layer1", "stem"): one for name, one in tensors.items()}
    save_file({**other, "fc.bias": torch.zeros(77), "ema.x": torch.ones(1)}, "o.safetensors")
    shown = hires("weights", "show", "o.safetensors", *SMALL[:2], "--json")
    assert (shown.code, json.loads(shown.out)["fits"]) == (2, False)
    refused = hires("weights", "import", "o.safetensors", *words)
    assert refused.code == 2
    assert " missing (layer1.0.conv1.weight, layer1.0.bn1.weight, " in refused.err
    assert " of no layer (ema.x, stem.0.bn1.bias, " in refused.err
    assert "fc.bias is [77] there and [10] here" in refused.err
    options = "--rename", "stem=layer1", "--without", "ema", "--fresh", "fc", "--json"
    answer = hires("weights", "import", "o.safetensors", *words, *options)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["fresh"] == ["fc.weight", "fc.bias"]
    fewer = "model.classes=3", "--out", "three.safetensors"
    answer = hires("weights", "import", "w.pth", *SMALL[:2], *fewer, "--fresh", "fc")
    assert answer.code == 0, answer.err
    assert load_file("three.safetensors")["fc.bias"].shape == (3,)


def test_weights_are_named_by_run_hash_step_and_kind(tmp_path):
    run = make_run(tmp_path / "results")
    last = run / "checkpoints" / "step000012"
    last.mkdir(parents=True)
    for name in ("", "/best", "/ema", "/best/ema", "/checkpoints/step000012"):
        found = path_of_weights(f"0123abcd{name}", tmp_path / "results")
        assert (found, run_of_weights(found)) == (f"{run}{name}", run)
    assert run_of_weights(f"{last}/ema") == run
    assert path_of_weights("net.safetensors", tmp_path) == "net.safetensors"
    assert run_of_weights(str(tmp_path / "net.safetensors")) is None
