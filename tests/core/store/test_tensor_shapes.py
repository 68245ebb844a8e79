"""Is the checkpoint of another network known by the headers of its files alone?"""

from __future__ import annotations

import pytest

from hires.core.errors import ConfigError
from hires.core.store import checkpoints
from hires.core.store.checkpoints import DamagedError
from hires.core.store.tensor_shapes import refuse_other_network, shapes_in
from tests.helpers.run_folders import saved_with

SHAPES = {f"layer{n}.weight": [n + 1, 3] for n in range(6)}


def test_shapes_are_read_from_the_headers(tmp_path):
    assert shapes_in(checkpoints.read(saved_with(SHAPES, tmp_path))) == SHAPES


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": 1}']
)
def test_damaged_header_is_told(tmp_path, data):
    checkpoint = checkpoints.read(saved_with(SHAPES, tmp_path))
    (checkpoint.path / "stage00.safetensors").write_bytes(data)
    with pytest.raises(DamagedError, match="is damaged"):
        shapes_in(checkpoint)


def test_first_layers_that_differ_are_named_and_the_others_counted(tmp_path):
    checkpoint = checkpoints.read(saved_with(SHAPES, tmp_path))
    needed = {name: [9, 9] for name in SHAPES}
    with pytest.raises(ConfigError) as caught:
        refuse_other_network([checkpoint], {"new.bias": [1], **needed}, "there")
    assert str(caught.value) == (
        "checkpoint.resume=there: step000001 is of another network: it has no new.bias; "
        "layer0.weight is [1, 3] there and [9, 9] here; layer1.weight is [2, 3] there and [9, 9] "
        "here; and 4 more; use the model and model.classes of its run"
    )
    refuse_other_network([checkpoint], SHAPES, "there")
    refuse_other_network([], needed, "there")
