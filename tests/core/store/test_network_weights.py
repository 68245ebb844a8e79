"""Are weights found, and those of another network refused, before any rank starts?"""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.core.errors import ConfigError
from hires.core.store.network_weights import find_weights, require_fit
from tests.helpers.run_folders import saved_stages, saved_with

SHAPES = {"conv.weight": [4, 3, 3, 3], "bn.running_mean": [4], "fc.bias": [2]}


def written(path, shapes=SHAPES):
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path)
    return path


def test_run_folder_means_its_latest_whole_checkpoint(tmp_path):
    path = saved_with(SHAPES, tmp_path)
    place = find_weights(str(tmp_path))
    assert place.path == path == find_weights(str(path)).path
    assert place.is_checkpoint
    assert place.shapes() == SHAPES


def test_damaged_latest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog):
    before, last = (saved_stages([SHAPES], tmp_path, step) for step in (1, 2))
    data = bytearray((last / "stage00.safetensors").read_bytes())
    data[12] ^= 1
    (last / "stage00.safetensors").write_bytes(data)
    assert find_weights(str(tmp_path)).path == before
    assert "step000002 is damaged: stage00.safetensors" in caplog.text
    with pytest.raises(ConfigError, match=r"step000002 is damaged: stage00.safetensors"):
        find_weights(str(last))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "does not exist; give a run folder, a checkpoint or a file .safetensors"),
        ("weights.npz", "is no kind of file that is read"),
        ("", "it has no checkpoint in a folder checkpoints; run it with checkpoint.at_end=always"),
        ("pipe.safetensors", "cannot be read (not a plain file, and left out); give a plain file"),
    ],
)
def test_path_without_weights_is_refused(tmp_path, name, text):
    (tmp_path / "weights.npz").write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ConfigError) as caught:
        find_weights(str(tmp_path / name))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-8],  # truncated
        lambda data: data[:20],
        lambda data: b"",
        lambda data: (2**62).to_bytes(8, "little") + data[8:],  # a header of four exabytes
        lambda data: data.replace(b'"shape":[4]', b'"shape":[9]'),  # more than the file holds
    ],
)
def test_damaged_file_is_refused_by_its_header(tmp_path, damage):
    path = written(tmp_path / "w.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"w\.safetensors is damaged"):
        find_weights(str(path)).shapes()


def test_all_that_does_not_fit_is_in_one_message():
    held = {"conv.weight": [8, 3, 3, 3], "aux.bias": [2], "fc.bias": [2]}
    with pytest.raises(ConfigError) as caught:
        require_fit("weights=w", held, SHAPES)
    assert str(caught.value) == (
        "weights=w is of another network: of 3 tensors 1 missing, 1 of no layer, 1 of another "
        "shape; use the model and model.classes that the weights were trained with (it has no "
        "bn.running_mean; of no layer: aux.bias; conv.weight is [8, 3, 3, 3] there and "
        "[4, 3, 3, 3] here)"
    )


def test_many_names_are_counted_and_the_first_listed():
    # A ResNet-50 beside another network was a line of 4000 characters, its remedy at the end.
    held = {f"other.{n}": [1] for n in range(300)} | {f"same.{n}": [2] for n in range(9)}
    needed = {f"own.{n}": [1] for n in range(200)} | {f"same.{n}": [1] for n in range(9)}
    with pytest.raises(ConfigError) as caught:
        require_fit("weights=w", held, needed)
    text = str(caught.value)
    assert "of 209 tensors 200 missing, 300 of no layer, 9 of another shape; use the model" in text
    assert "it has no own.0, own.1, own.2, own.3, own.4, own.5, and 194 more; of no layer" in text
    assert "same.5 is [2] there and [1] here; and 3 more)" in text
    assert len(text) < 700


def test_prefix_of_a_wrapper_is_named():
    held = {f"module.{name}": shape for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match=r"begin with 'module\.': `hires weights import` takes"):
        require_fit("weights=w", held, SHAPES)


def test_counters_and_tensors_that_no_layer_reads_are_no_fault():
    held = {**SHAPES, "bn.num_batches_tracked": [], "unused": [3]}
    require_fit("weights=w", held, SHAPES, {"unused"})
