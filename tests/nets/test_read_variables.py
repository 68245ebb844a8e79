"""Which variables of the environment count as read by a network?"""

from __future__ import annotations

import os
import types

import pytest

from hires.nets.read_variables import ReadVariables


def read_by(module: str, source: str) -> dict[str, str | None]:
    """What is noted of some lines in a module of this name."""
    scope = vars(types.ModuleType(module)) | {"os": os}
    variables = ReadVariables()
    with variables.noting():
        exec(source, scope)
    return variables.read()


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['WIDTH']",
        "os.environ.get('WIDTH', '8')",
        "os.getenv('WIDTH')",
        "'WIDTH' in os.environ",
        "os.path.expandvars('$WIDTH')",
        "os.environ.setdefault('WIDTH', '8')",
    ],
)
def test_every_way_to_read_is_seen(source, monkeypatch):
    monkeypatch.setenv("WIDTH", "4")
    first = read_by("net", source)
    assert list(first) == ["WIDTH"]
    assert "4" not in first.values()  # it may be a password
    monkeypatch.setenv("WIDTH", "5")
    assert read_by("net", source) != first


def test_variable_that_is_not_set_counts_as_well(monkeypatch):
    monkeypatch.setenv("WIDTH", "1")
    monkeypatch.delenv("WIDTH")
    assert read_by("net", "os.environ.get('WIDTH')") == {"WIDTH": None}
    # What the network sets by itself was not there before.
    assert read_by("net", "os.environ['WIDTH'] = '3'; os.environ['WIDTH']") == {"WIDTH": None}


def test_torch_and_the_session_do_not_count(monkeypatch):
    monkeypatch.setenv("TERM", "x")
    monkeypatch.setenv("SSH_TTY", "x")
    assert read_by("torch.fx", "os.environ.get('TORCH_LOGS')") == {}
    assert (
        read_by("net", "dict(os.environ), os.environ.get('TERM')")
        .keys()
        .isdisjoint({"TERM", "SSH_TTY"})
    )
    assert "PATH" in read_by("net", "dict(os.environ)")


def test_nothing_is_noted_outside_the_block():
    before = type(os.environ).__getitem__
    variables = ReadVariables()
    with variables.noting(), variables.noting():
        pass
    os.environ.get("WIDTH")
    assert variables.read() == {}
    assert type(os.environ).__getitem__ is before
