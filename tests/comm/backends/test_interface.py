"""Do ranks on several machines talk over the network that joins them?"""

from __future__ import annotations

import os

import pytest

from hires.comm.backends import known_backends
from hires.core.ranks.world import World


@pytest.fixture(autouse=True)
def _routes(monkeypatch):
    monkeypatch.setattr(known_backends, "interface_towards", {"10.0.0.1": "eth7"}.get)
    monkeypatch.setattr(known_backends.GlooBackend, "join", lambda *_: None)
    # Set before it is taken away: so what a test makes the code set is taken away afterwards.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def chosen(local_size: int, address: str = "10.0.0.1") -> str | None:
    known_backends.BACKENDS["gloo"](World(0, 4, 0, local_size, address, 29500, 0), 1.0)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_interface_leads_to_the_first_machine():
    assert chosen(2) == "eth7"


def test_ranks_of_one_machine_are_left_alone():
    assert chosen(4) is None


def test_interface_that_was_named_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert chosen(2) == "ib0"


def test_unknown_network_is_left_to_the_transport():
    assert chosen(2, "10.9.9.9") is None
