"""A rank without torch: it follows the variable HIRES_FAKE_RANKS, so that launchers can be tested.

HIRES_FAKE_RANKS is JSON, {"rank": "behaviour"}; a rank that is not named behaves well. Behaviours:

    ok, meet (prints where), short (one step missing), nan (its loss is no number), exit N, raise,
    kill, segv, hang, deaf (ignores SIGTERM), stopped (SIGSTOP), lost (fails after a step)
    leaves (starts a child, then behaves well), parent (starts a child, then hangs)
    hub (waits on the others and reports when one is gone), late (fails, then takes its time)
    full (fills the disk, then behaves well), port N (says for N starts that its port is taken)
    way (saves when SIGUSR2 asks for it), way N (exits with a code then)
    saver, breaker, ignorer, finisher (on SIGUSR2 they save, fail, do nothing and finish)
    listener (dies of SIGUSR2), interrupt N (sends Ctrl-C to process N, then hangs)
    picky TEXT (fails if the run's name holds the text), once N (hangs in the first attempt of seed
    N), shows NAME (prints a variable, also as C code reads it), orphan (kills its launcher, once)
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

from hires.core.ranks import world
from hires.core.store import file_names, records
from hires.core.store.files import append_line
from hires.core.store.reading import read_lines


def main() -> None:
    here = world.from_environment()
    run_dir = Path(sys.argv[1])
    behaviour = json.loads(os.environ.get("HIRES_FAKE_RANKS", "{}")).get(str(here.rank), "ok")
    sys.stdout.write(f"rank {here.rank} is {behaviour}\n")
    word, _, argument = behaviour.partition(" ")
    _BEHAVIOURS[word](here, run_dir, argument)


def ok(here, run_dir, argument, steps=None):
    metrics = file_names.attempt_dir(run_dir, here.attempt) / "metrics.jsonl"
    config = records.read_config(run_dir)
    sizes = {"params_bytes": 100 << 20, "grads_bytes": 90 << 20, "optimizer_bytes": 80 << 20}
    append_line(metrics, {"kind": "ready", "rank": here.rank, "rss_import_bytes": 1, **sizes})
    for step in range(config.steps if steps is None else steps):
        line = {"kind": "step", "rank": here.rank, "step": step, "data_s": 0.0}
        line |= {"step_s": 0.5 + here.rank / 4, "loss": 2.0 - step if here.rank else None}
        append_line(metrics, line)
    line = {"kind": "memory", "rank": here.rank, "peak_bytes": 1 << 30, "source": "rss", **sizes}
    append_line(metrics, line)
    if here.rank == 0:
        append_line(metrics, {"kind": "done", "rank": 0})
        records.finish(run_dir, here.attempt, "done") if not sys.argv[2:] else None


def shows(here, run_dir, argument):
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    text = (library.getenv(argument.encode()) or b"").decode()
    sys.stdout.write(f"{argument} is {text}, and {os.environ.get(argument)}\n")
    ok(here, run_dir, argument)


def meet(here, run_dir, argument):
    sys.stdout.write(f"it meets others at {here.address}:{here.port}\n")
    ok(here, run_dir, argument)


def short(here, run_dir, argument):
    ok(here, run_dir, argument, steps=1)


def raise_(here, run_dir, argument):
    raise ValueError("this rank was told to fail")


def kill(here, run_dir, argument):
    _meet_hub(here)
    os.kill(os.getpid(), signal.SIGKILL)


def segv(here, run_dir, argument):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(here, run_dir, argument):
    time.sleep(60)


def deaf(here, run_dir, argument):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def stopped(here, run_dir, argument):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def full(here, run_dir, argument):
    with contextlib.suppress(OSError), (run_dir / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    ok(here, run_dir, argument)


def leaves(here, run_dir, argument):
    _start_child(run_dir)
    ok(here, run_dir, argument)


def parent(here, run_dir, argument):
    _start_child(run_dir)
    time.sleep(60)


def _start_child(run_dir):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (run_dir / "child.pid").write_text(str(child.pid))


def hub(here, run_dir, argument):
    """Loses a neighbour within microseconds, as a rank does that waits for its halo."""
    with socket.create_server((here.address, here.port)) as server:
        peer, _ = server.accept()
        peer.recv(1)
    _fail(here, run_dir, "CommError", "lost a neighbour")
    sys.exit(1)


def late(here, run_dir, argument):
    """Fails first, but its process ends after those that fail because of it."""
    _fail(here, run_dir, "RunError", "broken.tif is broken")
    _meet_hub(here)
    _CONNECTIONS.clear()
    time.sleep(0.15)
    sys.exit(1)


def nan(here, run_dir, argument):
    ok(here, run_dir, argument, steps=1)
    _fail(here, run_dir, "LossError", "the loss is nan at step 0")
    sys.exit(1)


def lost(here, run_dir, argument):
    ok(here, run_dir, argument, steps=1)
    _fail(here, run_dir, "RunError", "broken.tif is broken")
    sys.exit(1)


def port(here, run_dir, argument):
    events = read_lines(run_dir / "a0/events.jsonl")
    if [e["event"] for e in events].count("launch_started") <= int(argument):
        raise OSError("The server socket has failed to listen: EADDRINUSE")
    ok(here, run_dir, argument)


def saver(here, run_dir, argument):
    _listen(lambda: os._exit(75))


def breaker(here, run_dir, argument):
    _listen(lambda: os._exit(1))


def ignorer(here, run_dir, argument):
    _listen(lambda: None)


def finisher(here, run_dir, argument):
    def finish():
        ok(here, run_dir, argument)
        os._exit(0)

    _listen(finish)


def listener(here, run_dir, argument):
    _listen(None)


def way(here, run_dir, argument):
    """Is slow to start, then makes way when it is asked, or exits with a code instead."""
    time.sleep(0.3)
    asked = signal.sigwait([signal.SIGUSR2])
    assert asked == signal.SIGUSR2
    if argument:
        sys.exit(int(argument))
    if here.rank == 0:
        records.event(run_dir, here.attempt, "made_way", step=2)
    sys.exit(75)


def exit_(here, run_dir, argument):
    sys.exit(int(argument))


def _listen(answer):
    """Waits for SIGUSR2, again and again."""
    if answer is not None:
        signal.signal(signal.SIGUSR2, lambda number, frame: answer())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    sys.stdout.write("it listens\n")
    sys.stdout.flush()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)


def picky(here, run_dir, argument):
    if argument in run_dir.name:
        sys.exit(1)
    ok(here, run_dir, "")


def once(here, run_dir, argument):
    if here.attempt == 0 and records.read_config(run_dir).seed == int(argument):
        time.sleep(60)
    ok(here, run_dir, "")


def orphan(here, run_dir, argument):
    with contextlib.suppress(FileExistsError):
        (run_dir.parent / "killed").touch(exist_ok=False)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    ok(here, run_dir, "")


def interrupt(here, run_dir, argument):
    os.kill(int(argument), signal.SIGINT)
    time.sleep(60)


def _fail(here, run_dir, kind, text):
    records.event(run_dir, here.attempt, "rank_failed", rank=here.rank, type=kind, text=text)


def _meet_hub(here):
    """Connects to the hub, if rank 0 is one; the connection closes when this process ends."""
    if json.loads(os.environ["HIRES_FAKE_RANKS"]).get("0") != "hub":
        return
    for _ in range(200):
        try:
            _CONNECTIONS.append(socket.create_connection((here.address, here.port)))
            return
        except OSError:
            time.sleep(0.02)


_CONNECTIONS: list = []
_BEHAVIOURS = {
    "ok": ok,
    "meet": meet,
    "shows": shows,
    "short": short,
    "raise": raise_,
    "kill": kill,
    "segv": segv,
    "hang": hang,
    "deaf": deaf,
    "stopped": stopped,
    "full": full,
    "leaves": leaves,
    "parent": parent,
    "hub": hub,
    "late": late,
    "nan": nan,
    "lost": lost,
    "port": port,
    "exit": exit_,
    "saver": saver,
    "breaker": breaker,
    "ignorer": ignorer,
    "finisher": finisher,
    "listener": listener,
    "way": way,
    "picky": picky,
    "once": once,
    "orphan": orphan,
    "interrupt": interrupt,
}

if __name__ == "__main__":
    main()
