"""Are tensors written as they are, with little memory, and is harm to them seen?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hires.core.store.checkpoints import DamagedError
from hires.engine import tensorfile
from hires.engine.live_bytes import LiveBytes
from hires.engine.tensorfile import TensorFile, write

TENSORS = {
    "weight": torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last),
    "bias": torch.arange(7, dtype=torch.float64),
    "count": torch.tensor(3),
    "odd": torch.arange(5, dtype=torch.uint8),
    "half": torch.randn(3, 2).to(torch.bfloat16).T,
    "flags": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
}


def test_any_reader_of_safetensors_gets_the_tensors_back(tmp_path):
    write(tmp_path / "file", TENSORS)
    read = load_file(tmp_path / "file")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    file = TensorFile(tmp_path / "file")
    assert torch.equal(file.tensor("half"), TENSORS["half"])


def test_large_tensor_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE_BYTES", 2**10)
    rows = torch.randn(64, 2, 5, 5).contiguous(memory_format=torch.channels_last)
    with LiveBytes() as live:
        live.assign([rows], "params")
        write(tmp_path / "file", {"rows": rows})
    # Pieces of 1 KiB hold five rows of 200 bytes; the next one is made before the last one is gone.
    assert 0 < live.at_peak["activations"] <= 2 * 2**10
    assert torch.equal(load_file(tmp_path / "file")["rows"], rows)


def test_digest_is_that_of_the_whole_file(tmp_path: Path):
    stored = write(tmp_path / "file", TENSORS, {"a": "fact"})
    data = (tmp_path / "file").read_bytes()
    assert (stored.num_bytes, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert stored.shapes == {name: list(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_short_file_is_damaged(tmp_path: Path, size: int):
    path = tmp_path / "file"
    write(path, TENSORS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedError, match="is damaged"):
        TensorFile(path)
