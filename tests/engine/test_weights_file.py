"""Do ranks begin with the weights that a file holds, whatever wrote it and whatever the layout?"""

from __future__ import annotations

import re
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from hires.cli.tracing import TorchProcess
from hires.core.errors import ConfigError, RunError
from hires.core.store import rundir
from hires.core.store.frozen import RunInputs
from hires.core.store.network_weights import find_weights
from hires.engine.build import whole_model
from hires.engine.torch_server import reply_to
from hires.engine.weights_file import open_weights
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.saved import attempt


def trained(path, **keys):
    """Writes weights that are not the first ones, as plain torch names them."""
    model = whole_model(config_of(**keys))
    state = {name: tensor * 0.9 + 0.01 for name, tensor in model.state_dict().items()}
    state = {n: t.long() if n.endswith("tracked") else t.float() for n, t in state.items()}
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return path, state


@pytest.mark.dist
@pytest.mark.parametrize(("suffix", "task"), [(".safetensors", "train"), (".pt", "infer")])
def test_layout_with_weights_is_one_process_with_weights(tmp_path, suffix, task):
    # The one process reads the same file, whole; without it its output is another.
    path, _ = trained(tmp_path / f"w{suffix}")
    layout = {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"}
    keys = {"weights": str(path), "task": {"name": task}}
    answer = verified(tmp_path, parallel=layout, image=[32, 32], **keys)
    assert answer["max_rel_err"] < 1e-10


@pytest.mark.dist
def test_weights_that_have_changed_since_the_plan_are_refused(tmp_path):
    path, state = trained(tmp_path / "w.safetensors")
    config = config_of(weights=str(path), results=str(tmp_path))
    inputs = RunInputs(weights=find_weights(str(path)).digest())
    run = rundir.create(config, plan_of(config).to_dict(), ["hires", "run"], inputs).path
    save_file({name: tensor * 2 for name, tensor in state.items()}, path)
    with pytest.raises(AssertionError, match="holds other numbers than when the run was planned"):
        attempt(run)


def test_digest_of_a_pickle_is_that_of_its_tensors_in_another_file(tmp_path):
    state = {
        "conv": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.randn(3, 5).bfloat16().T,
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "none": torch.empty(0, 2),
    }
    save_file({name: one.contiguous() for name, one in state.items()}, tmp_path / "w.safetensors")
    torch.save({"model": state}, tmp_path / "w.pt")
    digest = find_weights(str(tmp_path / "w.safetensors")).digest()
    with TorchProcess() as process:
        assert process.weights(tmp_path / "w.pt")["digest"] == digest
    state["half"] = state["half"].half()
    torch.save(state, tmp_path / "other.pt")
    assert open_weights(str(tmp_path / "other.pt")).digest() != digest


class Evil:
    def __reduce__(self):
        return print, ("code of a stranger",)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: torch.save({"w": Evil()}, path), r"running code from it \(it holds print\)"),
        (lambda path: torch.save([1, 2], path), "something else than tensors by name"),
        (lambda path: torch.save({}, path), "something else than tensors by name"),
        (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "something else"),
        (lambda path: path.write_bytes(b"\x80\x04N."), "no file of torch.save, or is truncated"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "cannot be read"),
    ],
)
def test_pickle_that_is_no_plain_state_dict_is_refused(tmp_path, capsys, make, text):
    make(tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=text) as error:
        open_weights(str(tmp_path / "w.pt"))
    # torch's own text advises to trust the file and to run its code.
    assert not re.search("weights.only|trust|\x1b", str(error.value), re.IGNORECASE)
    assert "stranger" not in capsys.readouterr().out
    answer = reply_to({"weights": str(tmp_path / "w.pt")})["error"]
    assert answer["type"] == "ConfigError"


def test_tensor_that_claims_more_than_the_file_holds_costs_no_memory(tmp_path):
    # A view with strides of 0: a terabyte of a single number.
    torch.save({"w": torch.zeros(1).expand(2**38)}, tmp_path / "w.pt")
    assert open_weights(str(tmp_path / "w.pt")).shapes == {"w": [2**38]}


def test_changed_file_is_refused_by_the_rank_that_reads_it(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    weights = open_weights(str(tmp_path / "w.safetensors"))
    for name, tensor in (("w", torch.zeros(4)), ("v", torch.zeros(3)), ("w", torch.zeros(3).int())):
        with pytest.raises(RunError):
            weights.fill_all({name: tensor})
