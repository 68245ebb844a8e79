"""What ranks do to try ``nccl_direct`` on a C library with NCCL's interface (fake_nccl.c)."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires.comm.backends.nccl_direct import NcclDirectBackend
from hires.comm.backends.nccl_library import NcclLibrary
from hires.core.errors import CommError
from hires.core.ranks.world import World
from tests.helpers.nccl_direct_check import wrong_results

SOURCE = Path(__file__).with_name("fake_nccl.c")


def compiled(folder: Path) -> Path | None:
    """Returns the library; None: there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libfake_nccl.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


class Streams:
    """The streams and events of a device that does all at once, and notes what it is asked."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.late = False  # no event passes

    def Stream(self) -> Stream:  # noqa: N802
        """Returns the next stream."""
        return Stream(self, len([one for one in self.notes if one == "stream"]) + 7)

    def current_stream(self) -> Stream:
        """Returns the caller's stream, 1."""
        return Stream(self, 1)

    def stream(self, stream: Stream) -> Any:
        """Makes it the current one."""
        return nullcontext()

    def Event(self) -> Event:  # noqa: N802
        """Returns an event."""
        return Event(self)


class Stream:
    """A stream of :class:`Streams`."""

    def __init__(self, device: Streams, number: int) -> None:
        self._device, self.cuda_stream = device, number

    def wait_event(self, event: Event) -> None:
        """Notes who waits for what."""
        self._device.notes.append(f"{self.cuda_stream} waits for {event.recorded}")


class Event:
    """An event of :class:`Streams`."""

    def __init__(self, device: Streams) -> None:
        self._device, self.recorded = device, 0

    def record(self, stream: Stream) -> None:
        """Notes where."""
        self.recorded = stream.cuda_stream

    def query(self) -> bool:
        """Whether it has passed."""
        return not self._device.late


def joined(
    world: World, library: str, timeout_s: float = 30.0
) -> tuple[NcclDirectBackend, Streams]:
    """Returns the backend of a rank, and its streams."""
    streams = Streams()
    backend = NcclDirectBackend(NcclLibrary(library), torch.device("cpu"), streams)
    patience = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(world.address, world.port, world.size, world.rank == 0, patience)
    backend.join(world, store, timeout_s)
    return backend, streams


def every_operation(world: World, library: str, folder: str) -> tuple[list[str], list[str]]:
    """Returns what came out wrong, and what was called for the first sum."""
    os.environ["FAKE_NCCL"] = folder
    backend, streams = joined(world, library)
    wrong: list[str] = []
    streams.notes.clear()
    backend.all_reduce(torch.ones(3))
    first = [*streams.notes, Path(folder, f"log.{world.rank}").read_text().splitlines()[-1]]
    pair = backend.new_group([0, world.size - 1])
    wrong += wrong_results(backend, world.rank, world.size, torch.device("cpu"))
    if pair.index >= 0:
        one = torch.tensor([world.rank + 1.0])
        backend.all_reduce(one, group=pair)
        wrong += [] if one.item() == 1 + world.size else ["pair"]
        channel_peer = world.size - 1 - world.rank
        got, sent = torch.zeros(2), torch.full((2,), float(world.rank))
        ops = [
            backend.P2POp(backend.isend, sent, channel_peer, pair),
            backend.P2POp(backend.irecv, got, channel_peer, pair),
        ]
        for work in backend.batch_isend_irecv(ops):
            work.wait()
        wrong += [] if got.tolist() == [float(channel_peer)] * 2 else ["batch"]
    backend.barrier()
    backend.destroy_process_group()
    return wrong, first


def failures(world: World, library: str, folder: str) -> list[str]:
    """Returns what is said of a library that never gets ready, of a late event and of a failure."""
    os.environ["FAKE_NCCL"] = folder
    backend, streams = joined(world, library)
    said = []
    streams.late = True
    work = backend.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    said.append(_error(lambda: work.wait(datetime.timedelta(seconds=0.1))))
    streams.late = False
    os.environ["FAKE_NCCL_FAIL"] = "AllReduce"
    said.append(_error(lambda: backend.all_reduce(torch.ones(1))))
    del os.environ["FAKE_NCCL_FAIL"]
    said.append(_error(lambda: backend.broadcast(torch.ones(1), 5)))
    backend.abort()
    os.environ["FAKE_NCCL_STUCK"] = "1"
    patience = datetime.timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, patience)
    alone = World(0, 1, 0, 1, "127.0.0.1", 1, 0)
    stuck = NcclDirectBackend(NcclLibrary(library), torch.device("cpu"), Streams())
    said.append(_error(lambda: stuck.join(alone, store, 0.2)))
    os.environ["FAKE_NCCL_VERSION"] = "21700"
    said.append(_error(lambda: NcclLibrary(library)))
    return [*said, Path(folder, f"log.{world.rank}").read_text().splitlines()[-2]]


def _error(call: Any) -> str:
    try:
        call()
    except (CommError, ValueError) as error:
        return str(error)
    return "none"
