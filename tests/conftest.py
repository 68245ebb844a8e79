"""Fixtures that tests of several packages use."""

from __future__ import annotations

import contextlib
import functools
import gc
import getpass
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hires.core.config.launcher_config import DIALECTS
from hires.core.config.run_config import DEVICE_KINDS
from hires.launcher.ranks import spawn
from tests.helpers.mpi_ranks import MPIS

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class Answer:
    """What a command line answered."""

    code: int
    out: str
    err: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file with one MPI on one worker: they share commands."""
    for item in items:
        if item.get_closest_marker("mpi"):
            library = getattr(item, "callspec", None) and item.callspec.params.get("mpi")
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {library}"))


def pytest_collection_finish() -> None:
    """Sets aside what was collected, and leaves the cores to other processes."""
    gc.set_threshold(20_000, 20, 20)  # a trace allocates a lot, and little of it is garbage
    if torch := sys.modules.get("torch"):
        # Threads of several processes on few cores wait for each other, and poll meanwhile.
        torch.set_num_threads(1)


_num_frozen = 0
"""Modules whose objects were set aside."""


def pytest_runtest_setup() -> None:
    """Sets aside what was imported: neither collections nor traces look at it again.

    A trace looks at all objects for generators of random numbers, and its first one imports a lot.
    """
    global _num_frozen
    if len(sys.modules) > _num_frozen + 20:
        gc.collect()
        gc.freeze()
        _num_frozen = len(sys.modules)


def pytest_configure() -> None:
    """Allows ``device=simulated``, which tests.helpers.simulated_device registers in ranks.

    Ctrl-C counts even where a shell began the tests in its background, which ignores it.
    """
    if "simulated" not in DEVICE_KINDS:
        DEVICE_KINDS.append("simulated")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests use neither the cache nor the terminal settings of the user, and wait for no disk."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # torch sets it to this at the first trace, which would change the environment of a test.
        folder = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder))
        patch.setattr(
            os, "fsync", lambda file: None
        )  # tests write thousands of files for themselves
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_process(_own_cache: None) -> Iterator[None]:
    """Ranks and traces of the session, except those of an unusual environment, import torch once.

    The process starts with the first of them.
    """
    modules = [*spawn.MODULES, "tests.helpers.jobs", "tests.helpers.warm_up:trace_something"]
    with _warm(modules) as warm, _used(warm):
        yield


@pytest.fixture(scope="session")
def _lean_process(_own_cache: None) -> Iterator[spawn.WarmProcess | None]:
    """Has imported no torch, so that its forks cost little."""
    with _warm(["tests.helpers.fake_rank"]) as warm:
        yield warm


@pytest.fixture
def lean_forks(_lean_process: spawn.WarmProcess | None) -> Iterator[None]:
    """Fake ranks, and what starts them, are forks of a process without torch."""
    with _used(_lean_process):
        yield


@pytest.fixture(scope="session")
def torchrun_forks(_own_cache: None) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Returns a context in which torchrun is a fork of a process that has imported it."""
    with _warm(["torch.distributed.run"]) as warm:
        yield functools.partial(_used, warm)


@contextlib.contextmanager
def _warm(modules: list[str]) -> Iterator[spawn.WarmProcess | None]:
    variables = {"PYTHONPATH": str(REPOSITORY), **spawn.thread_variables(1)}
    warm = spawn.WarmProcess({**os.environ, **variables}, modules=modules, kept=True)
    yield warm
    warm.end()


@contextlib.contextmanager
def _used(warm: spawn.WarmProcess | None) -> Iterator[None]:
    before = spawn._current
    spawn.use(warm)
    yield
    spawn.use(before)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Takes back what a test, or torch when it traces, left in the environment.

    Otherwise later tests could not use the warm process, which began with another one.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_log() -> Iterator[None]:
    """Takes back where a command that ran in this process logs: to a stream that is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def hires(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Runs one command line of hires in this process, in an empty folder."""
    from hires.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(*words: str) -> Answer:
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs Python with some arguments in a fresh process, in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(*words: str) -> Answer:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """``cpu``, or a GPU of tests with that mark; HIRES_TEST_GPU=cpu shows that these work."""
    if request.node.get_closest_marker("gpu") is None:
        return "cpu"
    name = os.environ.get("HIRES_TEST_GPU", "cuda")
    if name == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here, or torch is built without CUDA")
    return name


@pytest.fixture(params=MPIS)
def mpi(request) -> str:
    """The name of an MPI; skips where it is not installed."""
    program = DIALECTS[request.param].programs.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    return request.param
