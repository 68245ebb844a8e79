"""Stored maps have their rows again, in memory and on a disk, and say that a disk is full."""

from __future__ import annotations

import os

import pytest
import torch

from hires.core.errors import RunError
from hires.parallel.stored_maps import StoredMap


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_rows_come_back_as_they_were(dtype, on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    whole = (torch.rand(2, 3, 7, 5) * 200).to(dtype).contiguous(memory_format=torch.channels_last)
    stored = StoredMap(whole[:, :, :1], (2, 3, 7, 5), on_disk)
    for rows in ((0, 2), (2, 3), (3, 7)):
        stored.write(rows, whole[:, :, rows[0] : rows[1]])
    for rows in ((0, 1), (1, 6), (6, 7)):
        assert torch.equal(stored.read(rows), whole[:, :, rows[0] : rows[1]])
    assert [*tmp_path.iterdir()] == []  # the file has no name


def test_full_disk_is_an_error_with_a_remedy(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"store a map of 84 B in .*: No space left .* set TMPDIR"):
        StoredMap(torch.ones(1, 3, 1, 1), (1, 3, 7, 1), on_disk=True)
