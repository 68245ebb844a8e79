"""Weights are found, renamed, and those of another network refused before any rank starts."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from hires.cli.verbs.verb_weights import renamed
from hires.core.errors import ConfigError
from hires.core.store import message_files
from hires.core.store.network_weights import find_weights, require_fit, require_types
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


def test_path_without_weights_is_refused(tmp_path):
    (tmp_path / "weights.npz").write_bytes(b"PK")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, text in (
        ("nothing", "does not exist; give a run folder, a checkpoint or a file .safetensors"),
        ("weights.npz", "is no kind of file that is read"),
        (
            "",
            "no checkpoint in a folder checkpoints; run it with checkpoint.at_end=always --again,",
        ),
        ("pipe.safetensors", "cannot be read (not a plain file, and left out); give a plain file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            find_weights(str(tmp_path / name))


def test_damaged_file_is_refused_by_its_header(tmp_path):
    path = written(tmp_path / "w.safetensors")
    data = path.read_bytes()
    for damaged in (
        data[:-8],  # truncated
        data[:20],
        b"",
        (2**62).to_bytes(8, "little") + data[8:],  # a header of four exabytes
        data.replace(b'"shape":[4]', b'"shape":[9]'),  # more than the file holds
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"w\.safetensors is damaged"):
            find_weights(str(path)).shapes()


def test_all_that_does_not_fit_is_in_one_message():
    held = {"conv.weight": [8, 3, 3, 3], "aux.bias": [2], "fc.bias": [2]}
    with pytest.raises(ConfigError) as caught:
        require_fit("weights=w", held, SHAPES)
    assert str(caught.value) == (
        "weights=w is of another network: of 3 tensors 1 missing (bn.running_mean), 1 of no layer "
        "(aux.bias), 1 of another shape (conv.weight is [8, 3, 3, 3] there and [4, 3, 3, 3] here); "
        "use the model and model.classes that the weights were trained with"
    )


def test_what_belongs_to_a_network_under_other_names_or_types_is_told():
    require_fit("weights=w", {**SHAPES, "bn.num_batches_tracked": []}, SHAPES)  # no layer reads it
    wrapped = {f"module.{name}": shape for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match=r"all names begin with 'module\.': `hires weights imp"):
        require_fit("weights=w", wrapped, SHAPES)
    with pytest.raises(ConfigError, match=r"3 missing .*, 3 of no layer .*; use the model"):
        require_fit("weights=w", {**wrapped, "fc.bias": [2]}, SHAPES | {"conv.bias": [4]})
    require_types("weights=w", {"fc.bias": "float16"}, {"fc.bias": "float32"})
    with pytest.raises(ConfigError, match=r"other kinds of numbers .*fc.bias is int8 there and fl"):
        require_types("weights=w", {"fc.bias": "int8"}, {"fc.bias": "float32"})


def test_digest_is_that_of_names_types_shapes_and_numbers_wherever_they_lie(tmp_path):
    one = find_weights(str(saved_stages([{"a": [4], "b": [2, 3]}], tmp_path / "one"))).digest()
    for number, stages in enumerate(
        (
            [{"b": [2, 3]}, {"a": [4]}],  # of another layout
            [{"a[0:1]": [1], "b[1:2]": [1, 3]}, {"b[0:1]": [1, 3], "a[1:4]": [3]}],  # in rows
        )
    ):
        place = find_weights(str(saved_stages(stages, tmp_path / str(number))))
        assert place.digest() == one, stages
    tensors = {"a": np.zeros(4, np.float32), "b": np.zeros((2, 3), np.float32)}
    path = tmp_path / "net.safetensors"

    def digest(tensors, **metadata):
        save_file(tensors, path, metadata)
        return find_weights(str(path)).digest()

    assert digest(tensors) == digest(tensors, format="pt") == one
    assert digest({**tensors, "b.num_batches_tracked": np.zeros((), np.int64)}) == one
    changed = {**tensors, "b": np.zeros((2, 3), np.float32)}
    changed["b"][1, 2] = 1e-30
    others = [changed, {**tensors, "b": np.zeros((3, 2), np.float32)}]
    others += [{**tensors, "b": np.zeros((2, 3), np.int32)}, {"a": tensors["a"]}]
    others += [{"b": tensors["b"], "c": tensors["a"]}]
    assert len({one, *map(digest, others)}) == 6


def test_first_rule_that_fits_a_whole_part_of_a_name_renames_it():
    names = ["net.layer1.weight", "net.layer10.weight", "ema.decay"]
    found = renamed(names, ["net.layer1=stem", "net.layer1=never"], ["ema"])
    assert found == {names[0]: "stem.weight", names[1]: names[1]}
    for renames, without, text in (
        (["net.layer=x"], [], "--rename net.layer: no name begins with it"),
        (["net"], [], "--rename net must be OLD=NEW"),
        ([], ["head"], "--without head: no name begins with it"),
        (["net.layer10=net.layer1"], [], "would both be net.layer1.weight"),
    ):
        with pytest.raises(ConfigError, match=text):
            renamed(names, renames, without)


CALLS = [
    ["recv", "halo", "F0", [1], 4096, "shm", "mailbox", 1.0, 1.5, 2.0, 3.0],
    ["send", "", "", [], 0, "shm", "mailbox", 1.0, 1.0, 1.0, 1.0],
]


def test_messages_come_back_and_damaged_ones_are_a_note(tmp_path):
    assert list(message_files.read(tmp_path)) == []
    for rank in (1, 0):
        message_files.write(tmp_path, rank, "a machine", 3, CALLS)
    ranks = list(message_files.read(tmp_path))
    assert [(one.rank, one.clock, one.dropped) for one in ranks] == [
        (0, "a machine", 3), (1, "a machine", 3),
    ]  # fmt: skip
    assert [[*vars(one).values()] for one in ranks[1].messages] == [[1, *call] for call in CALLS]
    for place in range(len(CALLS[0])):
        for odd in (None, [], {}, "x", float("nan"), -1e300, [None], {"64": 5}):
            call = [*CALLS[0][:place], odd, *CALLS[0][place + 1 :]]
            message_files.write(tmp_path, 0, "a machine", 3, [call])
            notes: list = []
            read = list(message_files.read(tmp_path, notes))
            assert len(read) + len(notes) == 2, call
