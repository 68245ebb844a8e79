"""Does a machine know by which of its addresses others reach it?"""

from __future__ import annotations

import socket

import pytest

from hires.core.ranks import network

NAMES = [name for _, name in socket.if_nameindex()]


@pytest.mark.skipif("lo" not in NAMES, reason="the loopback goes by another name here")
def test_loopback_is_found_by_its_address():
    assert network.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_of("lo") == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == "lo"
    assert network.is_loopback("127.0.1.1")
    assert not network.is_loopback("10.0.0.1")


def test_every_interface_with_an_address_leads_to_itself():
    for name in NAMES:
        try:
            address = network.address_of(name)
        except OSError:
            continue
        assert network.address_of(network.interface_towards(address) or "") == address


def test_name_that_leads_nowhere_has_no_interface():
    assert network.interface_towards("no-such-host.invalid") is None
    with pytest.raises(OSError, match=r".+"):
        network.address_of("none7")
