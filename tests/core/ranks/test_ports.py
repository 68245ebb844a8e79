import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hires.core.errors import ConfigError
from hires.core.ranks import ports


def chosen(port):
    with ports.reserve(port) as number:
        return number


def test_free_port_is_chosen_and_rank_0_may_listen_at_it():
    with ports.reserve(0) as port, socket.create_server(("127.0.0.1", port)):
        pass
    with ports.reserve(port) as same:
        assert same == port


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux keeps the port")
def test_nobody_else_gets_the_port_by_chance():
    """Two runs that meet at one port talk to each other's ranks before either notices."""
    with ports.reserve(0) as port:
        for _ in range(2000):
            with ports.reserve(0) as other:
                assert other != port
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux keeps the port")
@pytest.mark.parametrize("choice", ["0", "own"])
def test_two_launchers_never_have_one_port(choice):
    """Both may bind it as long as nobody listens; ranks of one run would then join the other."""
    own = chosen(0) if choice == "own" else 0
    code = (
        "from hires.core.ranks import ports\n"
        f"with ports.reserve({own}) as port: print(port, flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            port = int(other.stdout.readline())
            with pytest.raises(ports.PortTakenError, match="is taken"):
                chosen(port)
            other.communicate("\n", timeout=60)
        finally:
            other.kill()
    assert chosen(port) == port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_taken_port_is_named_with_the_remedy(address):
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"launcher\.port={port} is taken; .*port=0"):
            chosen(port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_port_taken_on_the_other_kind_of_address_counts():
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with server, pytest.raises(ConfigError, match="is taken"):
        chosen(server.getsockname()[1])


def test_port_whose_last_connection_is_still_closing_is_free():
    """A run that has just ended leaves its port in TIME_WAIT; the next may use it at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        peer.close()  # whoever closes first waits
        client.close()
    assert chosen(port) == port


def test_port_that_is_not_permitted(monkeypatch):
    def refuse(port):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ports, "_try_to_listen", refuse)
    with pytest.raises(
        ConfigError, match=r"launcher\.port=80 cannot be used \(Permission denied\)"
    ):
        chosen(80)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("... failed to bind ... (errno: 98 - Address already in use).\n", True),
        ("DistNetworkError: port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n", True),
        ("ValueError: something else\n", False),
    ],
)
def test_log_tells_whether_the_port_was_taken(tmp_path, text, taken):
    log = tmp_path / "rank0000.log"
    assert not ports.was_taken(log)
    log.write_text(text)
    assert ports.was_taken(log) is taken
