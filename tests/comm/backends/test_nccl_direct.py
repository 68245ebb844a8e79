"""NCCL called directly: arguments, order and interface, on a C library that checks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hires.comm.backends import nccl_library
from hires.comm.backends.nccl_library import NcclLibrary
from hires.core.errors import CommError
from tests.helpers import nccl_direct_jobs as jobs
from tests.helpers.ranks import run_ranks


@pytest.fixture
def library(tmp_path: Path) -> str:
    made = jobs.compiled(tmp_path)
    if made is None:
        pytest.skip("there is no C compiler here")
    return str(made)


@pytest.mark.dist
def test_every_operation_and_type_on_two_ranks(library: str, tmp_path: Path):
    for wrong, first in run_ranks(jobs.every_operation, 2, library, str(tmp_path)):
        assert wrong == []
        # The communicator's stream waits for the caller's, NCCL runs there, the caller's waits.
        assert first == [
            "7 waits for 1",
            "1 waits for 7",
            "AllReduce count=3 type=7 op=0 root=-1 stream=7 group=0",
        ]


@pytest.mark.dist
def test_failures_are_named_and_never_hang(library: str, tmp_path: Path):
    [said] = run_ranks(jobs.failures, 1, library, str(tmp_path))
    late, failed, stranger, stuck, old, last = said
    assert late == "an operation of NCCL took over 0.1 s"
    assert failed == "ncclAllReduce failed: internal error: the fake library said so"
    assert stranger == "rank 5 is not among ranks [0]"
    assert stuck == "the start of NCCL among ranks [0] took over 0.2 s"
    assert "is NCCL 2.17.0; comm.backend=nccl_direct needs 2.18.0 or newer" in old
    assert last == "CommAbort"


def test_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl_library, "_places", lambda: iter(()))
    monkeypatch.setattr(nccl_library, "_NAME", "libno_such_nccl.so.2")
    nccl_library.shipped_library.cache_clear()
    with pytest.raises(CommError, match=r"no libno_such_nccl.* install a torch that is built for"):
        nccl_library.shipped_library()


def test_library_that_is_no_nccl_is_refused():
    with pytest.raises(CommError, match="is no NCCL that hires can call"):
        NcclLibrary("libm.so.6")
