"""Do the weights and networks that are written for other programs compute what the network does?"""

from __future__ import annotations

import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hires.core.errors import ConfigError
from hires.engine import network_files
from hires.engine.build import named_tensors, whole_model
from hires.engine.network_files import write_network, write_weights
from tests.helpers.layouts import config_of
from tests.helpers.new_runs import left_by_a_killed_process

MODEL = {"name": "resnet", "depth": 18, "classes": 4}


def state(scale=0.5, **keys):
    made = named_tensors(whole_model(config_of(**keys)))
    return {n: t.detach() * scale if t.is_floating_point() else t for n, t in made.items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_tensors_get_their_new_names_and_the_rest_is_of_the_seed(tmp_path, suffix):
    held, source = state(), tmp_path / "old.pt"
    torch.save({"model": {f"net.{name}": tensor for name, tensor in held.items()}}, source)
    names = {f"net.{n}": n for n in held if not n.startswith("fc.")}
    fresh = ["fc.weight", "fc.bias"]
    path = tmp_path / f"new{suffix}"
    facts = write_weights(str(source), path, names, fresh, config_of())
    written = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert facts == {"tensors": len(held), "bytes": sum(t.nbytes for t in held.values())}
    expected = {**held, **{name: state(1.0)[name] for name in fresh}}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert sorted(tmp_path.iterdir()) == sorted([source, path])


@pytest.mark.parametrize("name", ["new.safetensors", "new.pt2"])
def test_full_disk_is_named_before_torch_meets_it(tmp_path, monkeypatch, trained, name):
    # torch's writers end the process, or raise without a cause.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    path, names = tmp_path / name, {one: one for one in state()}
    ended = left_by_a_killed_process(tmp_path / "earlier.pt2")
    ended.mkdir()

    def written() -> object:
        if path.suffix == ".pt2":
            return write_network(trained, "exported", path)
        return write_weights(str(trained.weights), path, names, [], config_of())

    with pytest.raises(ConfigError, match=r"No space left on device.*--out"):
        written()
    assert not path.exists()
    assert not ended.exists()  # what another command had left


@pytest.fixture
def trained(tmp_path):
    save_file(state(0.9), tmp_path / "w.safetensors")
    return config_of(
        weights=str(tmp_path / "w.safetensors"), task={"name": "infer"}, precision={"name": "fp32"}
    )


def test_exported_program_computes_the_network_for_any_batch(tmp_path, trained):
    facts = write_network(trained, "exported", tmp_path / "net.pt2")
    assert facts["largest_error"] == 0.0
    images = torch.randn(5, 3, 19, 22)
    with torch.no_grad():
        expected = whole_model(trained)(images)
        outputs = torch.export.load(tmp_path / "net.pt2").module()(images)
    torch.testing.assert_close(outputs, expected)


def test_onnx_computes_the_network_for_any_batch(tmp_path, trained, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.ONNXProgram
    beside = functools.partialmethod(program.save, external_data=True)  # as above 1.5 GB
    with monkeypatch.context() as patch:
        patch.setattr(program, "save", beside)
        facts = write_network(trained, "onnx", tmp_path / "net.onnx")
    assert {one.name for one in tmp_path.iterdir()} == {
        "w.safetensors",
        "net.onnx",
        "net.onnx.data",
    }
    # Sums of a few hundred products in fp32, in another order.
    assert facts["largest_error"] < 1e-4
    session = runtime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    images = torch.randn(5, 3, 19, 22)
    [outputs] = session.run(None, {network_files.INPUT: images.numpy()})
    with torch.no_grad():
        expected = whole_model(trained)(images)
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-4)
