"""Reads which rank this process is from its environment, runs it, and says how it ends.

A launcher sets seven variables for every rank, which ``env://`` of ``torch.distributed`` reads too.
A command that starts all ranks (mpirun, srun, torchrun) numbers its processes in variables of its
own (:data:`DIALECTS`), and those of hires say where they meet. Such a command keeps exit codes to
itself: its ranks open their logs, and say in events where they run (``rank_started``) and how they
end (``rank_ended``). To it a preempted rank exits with 0, or it would end the others before they
have saved.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from hires.core import streams
from hires.core.config.launcher_config import DIALECTS
from hires.core.errors import PREEMPTED, ConfigError, HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.store import file_names, provenance, records, trust
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write

STARTER, MEETING = "HIRES_STARTER", "HIRES_MEETING"
"""Variables for all ranks that one command starts: its dialect, and address and port of rank 0."""


class Numbers(NamedTuple):
    """Which process this is, of how many."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class World:
    """One rank's view of all processes."""

    rank: int
    """This process, 0 to size - 1."""
    size: int
    local_rank: int
    """This process among those on the same machine."""
    local_size: int
    """Processes on this machine."""
    address: str
    """Host where rank 0 listens, at ``port``."""
    port: int
    attempt: int
    """Which attempt of the run: the records go to ``a<attempt>``."""
    secret: str = field(default="", repr=False)
    """What only its ranks have; empty: nothing (:mod:`hires.core.ranks.meeting`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"RANK={self.rank} must be 0 to WORLD_SIZE-1={self.size - 1}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank} and LOCAL_WORLD_SIZE={self.local_size} do not fit "
                f"each other and WORLD_SIZE={self.size}"
            )
        if not 0 < self.port <= 65535:
            raise ConfigError(f"MASTER_PORT={self.port} must be 1 to 65535")
        if self.attempt < 0:
            raise ConfigError(f"HIRES_ATTEMPT={self.attempt} must be 0 or more")

    def to_environment(self) -> dict[str, str]:
        """Returns the variables that make a process this rank."""
        return {name: str(getattr(self, field)) for field, name in _NAMES.items()}


def from_environment(environ: Mapping[str, str] = os.environ) -> World:
    """Returns this process's world; raises ConfigError if a variable is missing or wrong."""
    if (starter := environ.get(STARTER)) in DIALECTS:
        address, _, port = environ.get(MEETING, "").rpartition(":")
        attempt = number_of(_NAMES["attempt"], environ.get(_NAMES["attempt"], ""))
        return World(*rank_numbers(starter, environ), address, number_of(MEETING, port), attempt)
    missing = [name for name in _NAMES.values() if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"the environment variable {missing[0]} is not set: a rank is started by `hires run` "
            f"or by the launch.sh of a run folder, which set {', '.join(_NAMES.values())}"
        )
    names = {field: name for field, name in _NAMES.items() if field != "address"}
    numbers = {field: number_of(name, environ[name]) for field, name in names.items()}
    return World(address=environ[_NAMES["address"]], secret="", **numbers)


_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "address": "MASTER_ADDR",
    "port": "MASTER_PORT",
    "attempt": "HIRES_ATTEMPT",
}


def rank_numbers(starter: str, environ: Mapping[str, str]) -> Numbers:
    """Returns which process this is, by its starter; raises ConfigError if a variable is wrong."""
    dialect = DIALECTS[starter]
    versions = [names.split() for names in dialect.numbering.split("|")]
    names = next((some for some in versions if any(map(environ.get, some))), versions[0])
    texts = {name: environ.get(name, "") for name in names}
    for name, text in texts.items():
        if not text:
            raise ConfigError(
                f"the environment variable {name} is not set, so this process was not started by "
                f"{starter}; name its starter with launcher.mpi"
            )
    if dialect.node is not None:
        # The count of this node: 2(x3),1 are three nodes of two processes each, and one of one.
        name, counts = list(texts)[-1], list[str]()
        for part in texts[name].split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [count] * number_of(name, times or "1")
        node = number_of(dialect.node, environ.get(dialect.node, ""))
        if not 0 <= node < len(counts):
            raise ConfigError(f"the environment variable {name}={texts[name]!r} has no node {node}")
        texts[name] = counts[node]
    return Numbers(*(number_of(name, text) for name, text in texts.items()))


def number_of(name: str, text: str) -> int:
    """Returns the number that an environment variable holds; raises ConfigError if it is none."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={text!r} must be a number") from None


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a rank, whose run folder is the first word of its command, and ends the process."""
    streams.secure()
    world = None
    try:
        if STARTER in os.environ:
            world = _join(Path(sys.argv[1]))
        code = main() or 0
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        code = error.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if world is not None:
        with contextlib.suppress(RunError):  # the end of the command says that it is gone
            records.rank_event(sys.argv[1], world.attempt, "rank_ended", world.rank, code=code)
        code = 0 if code == PREEMPTED else code
    os._exit(code)  # threads of a broken transport must not keep a failed rank alive


def _join(run_dir: Path) -> World:
    """Takes the place of a rank that one command has started; returns its world.

    RunError: this node does not see the run folder, its log cannot be written, or its launcher has
    ended meanwhile.
    """
    records.require_seen(run_dir)
    trust.refuse_untrusted(run_dir)
    world = from_environment()
    attempt = Attempt(run_dir, world.attempt)
    heartbeat.require_launcher(attempt)
    log = file_names.rank_log(attempt.folder, world.rank)
    try:
        with log.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    except OSError as error:
        raise cannot_write(log, error) from error
    del os.environ[STARTER]
    # With those of torchrun, torch expects a store that another process hosts, and none does.
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ |= world.to_environment()
    records.rank_event(run_dir, world.attempt, "rank_started", world.rank, **provenance.myself())
    return world
