"""Errors of one rank alone do not ask what the others do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from hires.comm.guarded_waits import failure
from hires.comm.transport import transport
from hires.core.errors import CommError, EndedError, PeerError


class Check:
    """As the check of a world."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def reason(self, number: int, patience_s: float, ended: Sequence[int]) -> str:
        self.asked.append(patience_s)
        return "what the others do"


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (PeerError("it took over 3 s"), True),
        (EndedError("rank 1 has ended"), True),
        (OSError("broken pipe"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Invalid scalar type"), False),
        (NotImplementedError("no such operation"), False),
        (ValueError("Tag must be nonnegative"), False),
        (CommError("4 rows cannot be divided among 3 ranks"), False),
    ],
)
def test_only_what_another_rank_may_have_caused_asks_for_its_calls(
    error: Exception, asks: bool, monkeypatch: pytest.MonkeyPatch
):
    check = Check()
    monkeypatch.setattr(transport, "check", check)
    text = str(failure("a sum", error, "gloo", 5))
    short = str(error).rpartition("pair.cc:1] ")[2]  # the line of gloo's source is left out
    assert text.startswith(f"a sum over gloo failed: {short}")
    assert len(check.asked) == asks
    assert text.endswith("; what the others do") == asks
    if isinstance(error, EndedError):
        assert check.asked[0] < 1.0


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3. This may "
            "indicate that a remote process failed. GLHF!",
            "Connection closed by peer [127.0.0.1]:3",
        ),
        ("Message truncated, error stack:\nMPIR_Test(1)", "Message truncated"),
        (
            "NCCL error in: a.cpp:3, system error. Last error: x",
            "NCCL error in: a.cpp:3, system error. Last error: x",
        ),
        ("", "RuntimeError"),
    ],
)
def test_texts_of_libraries_are_short(text: str, short: str):
    assert str(failure("a sum", RuntimeError(text))) == f"a sum failed: {short}"
