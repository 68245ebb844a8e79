"""The channel between supervisor and agents, with strangers on the network."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import stat
import threading
import time

import pytest

from hires.core.errors import RunError
from hires.core.store import records
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import control_channel
from hires.launcher.ranks.agent import AgentRanks
from hires.launcher.ranks.rank_group import Launch
from tests.helpers.patience import PATIENCE_S, until


def test_caller_without_the_key_is_hung_up_on(tmp_path):
    ours = control_channel.ControlChannel("127.0.0.1", 2)
    ours.write(tmp_path, starter="openmpi")
    facts = control_channel.read(tmp_path)
    assert stat.S_IMODE((tmp_path / "line.json").stat().st_mode) == 0o600
    right = control_channel.call(facts, 1, PATIENCE_S)
    wrong = [
        control_channel.call({**facts, "key": "0" * 32}, 0, PATIENCE_S),
        control_channel.call({**facts, "key": "\ud800"}, 0, PATIENCE_S),
        control_channel.call(facts, 2, PATIENCE_S),
    ]
    right.send(code=7)
    heard = []
    while not heard or not all(wire.closed for wire in wrong):
        heard += ours.messages()
        for wire in wrong:
            assert list(wire.lines()) == []
        time.sleep(0.01)
    assert heard == [(1, {"code": 7})]
    ours.send(1, signal.SIGTERM)
    ours.send(0, signal.SIGTERM)  # nobody is there
    heard_there = []
    while len(heard_there) < 2:
        right.wait(PATIENCE_S)
        heard_there += right.lines()
    assert heard_there == [{"welcome": 1}, {"signal": 15}]
    right.close()
    while not heard[1:]:
        heard += ours.messages()
    assert heard[1:] == [(1, {})]
    ours.close()


def test_agent_without_a_supervisor_says_so(tmp_path):
    with pytest.raises(RunError, match=r"launch\.sh"):
        control_channel.read(tmp_path)
    server = control_channel.ControlChannel("127.0.0.1", 1)
    facts = {"line": ["127.0.0.1", server.port], "key": server.key}
    server.close()
    with pytest.raises(RunError, match=r"does not reach the supervisor .*launcher.interface"):
        control_channel.connect(facts, 0, 1.0)


@pytest.fixture
def supervised():
    """Returns a channel of three ranks, and what its supervisor has seen, which looks often."""
    channel = control_channel.ControlChannel("127.0.0.1", 3)
    seen, ended = [], threading.Event()

    def watch():
        while not ended.wait(0.01):
            seen.extend(channel.messages())

    thread = threading.Thread(target=watch)
    thread.start()
    yield channel, seen
    assert thread.is_alive(), "a stranger has ended the supervisor"
    ended.set()
    thread.join()
    channel.close()


def is_served(channel, rank):
    """Whether the agent of a rank is welcome, and what it sends arrives."""
    facts = {"line": ["127.0.0.1", channel.port], "key": channel.key}
    agent = control_channel.connect(facts, rank, PATIENCE_S)
    agent.send(code=rank)
    return agent


def first_line(**fields):
    return json.dumps(fields).encode() + b"\n"


STRANGERS = {
    "garbage": bytes(range(256)) * 64,
    "no line's end": b"x" * 2**20,
    "nesting": b"[" * 50_000 + b"\n",
    "deep objects": b'{"a":' * 300 + b"\n",
    "no UTF-8": b'{"rank": 0, "key": "\xff\xfe"}\n',
    "half a character": b'{"rank":0,"key":"\\ud800"}\n',
    "a number of many digits": b'{"rank": ' + b"9" * 900 + b"}\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty lines": b"\n" * 10_000,
    "wrong key": first_line(rank=0, key="0" * 32),
    "key of another type": first_line(rank=0, key=[["0"]]),
    "no object": b"[]\n",
    "nothing": b"",
}


@pytest.mark.parametrize("half", [False, True], ids=["open", "half-closed"])
def test_what_a_stranger_sends_is_dropped_and_counted(supervised, half):
    channel, seen = supervised
    for what, data in STRANGERS.items():
        seen.clear()
        before = channel.num_dropped
        with socket.create_connection(("127.0.0.1", channel.port)) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(data)
                if half:
                    stranger.shutdown(socket.SHUT_WR)
            agent = is_served(channel, 1)
            waits = what == "nothing" and not half  # it may take KEY_S
            most = before + (not waits)
            until(lambda most=most: seen and channel.num_dropped >= most, what, patience_s=20.0)
            assert seen == [(1, {"code": 1})], what
            assert channel.num_dropped == most, what
            agent.close()
        until(lambda: (1, {}) in seen)


def test_hundreds_of_silent_callers_keep_no_agent_out(supervised):
    channel, seen = supervised
    callers = []
    with contextlib.suppress(OSError):  # this process may have no more files either
        for number in range(400):
            if number % 100 == 0:
                time.sleep(0.02)  # they are accepted: the system makes more wait for a second
            callers.append(socket.create_connection(("127.0.0.1", channel.port), timeout=5))
    agents = [is_served(channel, rank) for rank in range(3)]
    until(lambda: len(seen) == 3)
    assert sorted(seen) == [(rank, {"code": rank}) for rank in range(3)]
    assert len(channel._connections) <= 3 + 3 + control_channel.SPARE_CALLERS  # and the agents
    for wire in (*callers, *agents):
        wire.close()


HOSTILE: tuple[dict[str, object], ...] = (
    {"started": 10**30},
    {"started": -1},
    {"started": True},
    {"code": float("nan")},
    {"code": 10**9},
    {"failed": {"a": 1}},
    {"started": 1, "host": ["x"]},
    {"code": None},
)


def test_hostile_values_of_an_agent_end_its_rank_alone(fake_world):
    """They reached int(), and their ValueError ended the supervisor."""
    run = fake_world("ok", "ok", name="torchrun")
    config = records.read_config(run)
    places = launcher_of(config).rank_places(config, 2)
    for fields in HOSTILE:
        job = Launch(run.path, run.attempt, config, "none", (), places)
        group = AgentRanks(job, 0, places.starter)
        facts = {"line": ["127.0.0.1", group._channel.port], "key": group._channel.key}
        agent = control_channel.call(facts, 1, PATIENCE_S)
        agent.send(**fields)
        until(lambda group=group: list(group.poll()), str(fields), patience_s=20.0)
        assert [rank.code for rank in group.ranks] == [None, -signal.SIGKILL]
        agent.close()
        group.kill()
