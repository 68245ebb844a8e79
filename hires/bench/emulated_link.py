"""Stands in for machines on a network: name spaces of this one, joined by links of a rate.

    rank 0's name space   eth0 ══ shaper ══╗
    rank 1's name space   eth0 ══ shaper ══╬══ bridge ── this process, which starts the ranks
    rank 2's name space   eth0 ══ shaper ══╝

Each shaper (tc-tbf) holds both ways of its link to the rate, as a network card with a full duplex
does. Ranks see machines of their own, so libraries take the network and no shared memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hires.core import programs
from hires.core.errors import ConfigError, RunError

NETWORK = "198.18.0"
"""Addresses that are for benchmarks alone (RFC 2544)."""
SHAPER = "burst 4mb latency 20ms"
_AGENT = "OMPI_MCA_plm_rsh_agent"


def require_links(rate: str, start: str) -> None:
    """ConfigError: these ranks cannot be on links; RunError: this user or machine has none."""
    if start != "openmpi":
        raise ConfigError(f"--link {rate}: --start {start} cannot start ranks there; use openmpi")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid():
        why = f"there is no {missing[0]} here (iproute2)" if missing else "this user is not root"
        raise RunError(
            f"--link {rate} needs name spaces, and {why}; run it as root, or leave it out"
        )


@contextlib.contextmanager
def emulated_hosts(number: int, rate: str, start: str) -> Iterator[list[str]]:
    """Yields the addresses of name spaces, which end with the block.

    ``rate``: as tc has it, ``10Gbit``. ``start``: what starts ranks there. Errors are those of
    :func:`require_links`.
    """
    require_links(rate, start)
    name, shaper = f"hires{os.getpid() % 10**6}", f"root tbf rate {rate} {SHAPER}"
    with contextlib.ExitStack() as stack:

        def do(words: str, undo: str = "") -> None:
            done = programs.run(*words.split(), most_s=30)
            if done.returncode:
                raise RunError(f"--link {rate}: `{words}` failed: {done.stderr.strip()}")
            if undo:
                stack.callback(programs.run, *undo.split(), most_s=30)

        do(f"ip link add {name} type bridge", f"ip link del {name}")
        do(f"ip addr add {NETWORK}.254/24 dev {name}")
        do(f"ip link set {name} up")
        for one in range(1, number + 1):
            space = outer = f"{name}-{one}"
            do(f"ip netns add {space}", f"ip netns del {space}")
            do(f"ip link add {outer} type veth peer name eth0 netns {space}")
            do(f"ip link set {outer} master {name} up")
            do(f"ip -n {space} addr add {NETWORK}.{one}/24 dev eth0")
            do(f"ip -n {space} link set eth0 up")
            do(f"ip -n {space} link set lo up")
            do(f"tc -n {space} qdisc add dev eth0 {shaper}")
            do(f"tc qdisc add dev {outer} {shaper}")
        agent = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "agent"
        enter = f'exec ip netns exec "{name}-${{host##*.}}" sh -c "$*"'
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\n{enter}\n", encoding="utf-8")
        agent.chmod(0o700)
        secret = os.environ.get("HIRES_SECRET") or secrets.token_hex(16)
        for key, value in {_AGENT: str(agent), "HIRES_SECRET": secret}.items():
            stack.callback(_restore, key, os.environ.get(key))
            os.environ[key] = value
        yield [f"{NETWORK}.{one}" for one in range(1, number + 1)]


def _restore(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value
