"""A rank without torch: it follows the variable HIRES_FAKE_RANKS, so that launchers can be tested.

HIRES_FAKE_RANKS is JSON, {"rank": "behaviour"}, where a behaviour is a name of ``_BEHAVIOURS`` and
maybe an argument; a rank that is not named behaves well (``ok``).
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from hires.core.ranks import heartbeat, world
from hires.core.store import file_names, records
from hires.core.store.files import append_metric

LONG_S = 90.0
"""Longer than a test waits for the end of a rank that hangs."""

connections: list = []


def main() -> None:
    here = world.from_environment()
    run_dir = Path(sys.argv[1])
    behaviour = json.loads(os.environ.get("HIRES_FAKE_RANKS", "{}")).get(str(here.rank), "ok")
    sys.stdout.write(f"rank {here.rank} is {behaviour}\n")
    word, _, argument = behaviour.partition(" ")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # as a worker does
    if word == "mute":  # it hangs before its heart beats
        time.sleep(LONG_S)
    timeout_s = records.read_config(run_dir).comm.timeout_s
    with heartbeat.beat(run_dir, here.attempt, here.rank, heartbeat.Activity(), timeout_s):
        _BEHAVIOURS[word](here, run_dir, argument)


def ok(here, run_dir, argument="", steps=None):
    folder = file_names.attempt_dir(run_dir, here.attempt)
    sizes = {"params_bytes": 100 << 20, "grads_bytes": 90 << 20, "optimizer_bytes": 80 << 20}
    append_metric(folder, here.rank, "ready", rss_import_bytes=1, **sizes)
    for step in range(records.read_config(run_dir).steps if steps is None else steps):
        line = {"step": step, "data_s": 0.0}
        line |= {"step_s": 0.5 + here.rank / 4, "loss": 2.0 - step if here.rank else None}
        append_metric(folder, here.rank, "step", **line)
    append_metric(folder, here.rank, "memory", peak_bytes=1 << 30, source="rss", **sizes)
    if here.rank == 0:
        append_metric(folder, 0, "done")
        records.finish(run_dir, here.attempt, "done") if not sys.argv[2:] else None
    if argument:
        sys.exit(int(argument))


def short(here, run_dir, argument):
    ok(here, run_dir, steps=1)


def shows(here, run_dir, argument):
    """Prints a variable, also as C code reads it."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    text = (library.getenv(argument.encode()) or b"").decode()
    sys.stdout.write(f"{argument} is {text}, and {os.environ.get(argument)}\n")
    ok(here, run_dir)


def raise_(here, run_dir, argument):
    raise ValueError("this rank was told to fail")


def signals(number):
    """Sends a signal to this process or another, and hangs if it is still there."""

    def act(here, run_dir, argument):
        _meet_hub(here)
        os.kill(int(argument or os.getpid()), number)
        time.sleep(LONG_S)

    return act


def hang(here, run_dir, argument):
    time.sleep(LONG_S)


def deaf(here, run_dir, argument):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(LONG_S)


def full(here, run_dir, argument):
    with contextlib.suppress(OSError), (run_dir / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    ok(here, run_dir)


def leaves(here, run_dir, argument):
    """Starts a child, then behaves well."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
    (run_dir / "child.pid").write_text(str(child.pid))
    ok(here, run_dir)


def hub(here, run_dir, argument):
    """Loses a neighbour within microseconds, as a rank does that waits for its halo."""
    with socket.create_server((here.address, here.port)) as server:
        peer, _ = server.accept()
        peer.recv(1)
    _fail(here, run_dir, "CommError", "lost a neighbour")


def late(here, run_dir, argument):
    """Fails first, but its process ends after those that fail because of it."""
    _report(here, run_dir, "RunError", "broken.tif is broken")
    _meet_hub(here)
    connections.clear()
    time.sleep(0.15)
    sys.exit(1)


def nan(here, run_dir, argument):
    ok(here, run_dir, steps=1)
    _fail(here, run_dir, "LossError", "the loss is nan at step 0")


def way(here, run_dir, argument):
    """Is slow to start, then makes way when it is asked, or exits with a code instead."""
    time.sleep(0.3)
    assert signal.sigwait([signal.SIGUSR2]) == signal.SIGUSR2
    if argument:
        sys.exit(int(argument))
    if here.rank == 0:
        records.event(run_dir, here.attempt, "preempted", step=2)
    sys.exit(75)


def exit_(here, run_dir, argument):
    sys.exit(int(argument))


def listens(answer):
    """Waits for SIGUSR2, again and again."""

    def act(here, run_dir, argument):
        signal.signal(signal.SIGUSR2, lambda number, frame: answer(here, run_dir))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        sys.stdout.write("it listens\n")
        sys.stdout.flush()
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            time.sleep(0.05)

    return act


def finish(here, run_dir):
    ok(here, run_dir)
    sys.exit(0)


def picky(here, run_dir, argument):
    """Fails if the run's name holds a text."""
    sys.exit(1) if argument in run_dir.name else ok(here, run_dir)


def once(here, run_dir, argument):
    """Hangs in the first attempt of a seed."""
    if here.attempt == 0 and records.read_config(run_dir).seed == int(argument):
        time.sleep(LONG_S)
    ok(here, run_dir)


def _fail(here, run_dir, kind, text):
    _report(here, run_dir, kind, text)
    sys.exit(1)


def _report(here, run_dir, kind, text):
    records.event(run_dir, here.attempt, "rank_failed", rank=here.rank, type=kind, text=text)


def _meet_hub(here):
    """Connects to the hub, if rank 0 is one; the connection closes when this process ends."""
    for _ in range(200 if json.loads(os.environ["HIRES_FAKE_RANKS"]).get("0") == "hub" else 0):
        try:
            connections.append(socket.create_connection((here.address, here.port)))
            return
        except OSError:
            time.sleep(0.02)


_BEHAVIOURS = {
    "ok": ok, "short": short, "nan": nan, "shows": shows, "full": full, "leaves": leaves,
    "raise": raise_, "exit": exit_, "hang": hang, "deaf": deaf, "hub": hub, "late": late,
    "kill": signals(signal.SIGKILL), "stopped": signals(signal.SIGSTOP),
    "terminate": signals(signal.SIGTERM), "interrupt": signals(signal.SIGINT),
    "way": way, "picky": picky, "once": once,
    "saver": listens(lambda here, run_dir: sys.exit(75)),
    "ignorer": listens(lambda here, run_dir: None), "finisher": listens(finish),
}  # fmt: skip

if __name__ == "__main__":
    world.run(main)
