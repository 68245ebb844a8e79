"""Keeps on disk what autograd saves for the backward pass, and brings it back in time.

A tensor that an operator saves goes to a file by a thread, and its memory is free once it is there.
On the way back another thread reads ahead, the last that was written first:

    forward    save a . save b . save c      |  backward   use c . use b . use a
    writer          a ----- b ----- c        |  reader          b ----- a ----

Parameters stay, and so does what is small. What has not been written when it is needed is taken
from memory. The file has no name: the system frees it with the process, however that ends.

Source:
    ``torch.autograd.graph.saved_tensors_hooks``; Rhu et al., "vDNN", MICRO 2016, for offloading by
    layers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hires.core.errors import RunError
from hires.parallel.nameless_file import NamelessFile

SMALLEST_BYTES = 2**16
"""Smaller tensors stay: those of channels, not of maps."""
MOST_WAITING = 2**26
"""Bytes that wait to be written, behind which a pass waits."""
MOST_AHEAD = 2**26
"""Bytes that are read before they are needed."""

Chain = list["weakref.ref[Saved]"]
"""What a pass has saved, in order."""


class Keeper:
    """Takes the tensors that autograd saves; :meth:`keep` says what becomes of each."""

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Takes what is saved inside, in this thread: a pass of one rank."""
        chain: Chain = []
        known: dict[tuple[Any, ...], tuple[Any, weakref.ref[Saved]]] = {}

        def pack(tensor: Tensor) -> Any:
            owner = tensor if tensor._base is None else tensor._base
            if tensor.nbytes < SMALLEST_BYTES or isinstance(owner, nn.Parameter):
                return tensor
            # A value may be saved by its operator and by its reader: it is kept once. The weak
            # reference keeps the address of its memory from being taken for that of another one.
            storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            place = storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            key = (*place, tensor.dtype, tensor._version)
            if key in known and not known[key][0].expired():
                found = known[key][1]()
                if found is not None:
                    return found
            saved = self.keep(tensor.detach(), chain)
            chain.append(weakref.ref(saved))
            known[key] = storage, chain[-1]
            return saved

        def unpack(packed: Any) -> Tensor:
            return packed.tensor() if isinstance(packed, Saved) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def keep(self, data: Tensor, chain: Chain) -> Saved:
        """Returns what brings a tensor back."""
        raise NotImplementedError


class Saved:
    """A tensor that autograd has saved, elsewhere."""

    def tensor(self) -> Tensor:
        """Returns it."""
        raise NotImplementedError


class Spill(Keeper):
    """The saved tensors of one process, in a file without a name in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._file = NamelessFile(folder)
        except OSError as error:
            raise _failed(folder, error) from error
        # One thread each: a disk that does one thing at a time is the fastest.
        self._writer, self._reader = (ThreadPoolExecutor(1, name) for name in ("spill", "unspill"))
        self._stop = weakref.finalize(self, _close, self._writer, self._reader, self._file)
        self._free: dict[int, list[int]] = {}  # places in the file by size
        self._waiting = self.ahead_bytes = 0
        self.room = threading.Condition()
        self._error: RunError | None = None
        self.file_bytes = self.written_bytes = 0
        """Size of the file, the most that it held at once, and all that was written to it."""

    def keep(self, data: Tensor, chain: Chain) -> Saved:
        """Begins to write a tensor; waits where many wait already; RunError: the disk is full."""
        dense = data.is_contiguous() or (
            data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last)
        )
        data, size = data if dense else data.contiguous(), data.nbytes
        with self.room:
            self.room.wait_for(lambda: self._waiting < MOST_WAITING)
            self._waiting += size
            if places := self._free.get(size):
                place = places.pop()
            else:
                place, self.file_bytes = self.file_bytes, self.file_bytes + size
        self.require_whole()
        saved = _OnDisk(self, data, place, chain)
        saved.written = self._writer.submit(self._write, weakref.ref(saved), data)
        return saved

    def read(self, saved: _OnDisk) -> Future[Tensor]:
        """Begins to read a tensor that was written."""
        return self._reader.submit(self._read, saved.place, saved.like)

    def free(self, place: int, num_bytes: int) -> None:
        """Makes room in the file."""
        with self.room:
            self._free.setdefault(num_bytes, []).append(place)

    def require_whole(self) -> None:
        """Raises RunError if something could not be written."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the threads, and with the file all that it holds."""
        self._stop()

    def _write(self, saved: weakref.ref[_OnDisk], data: Tensor) -> None:
        try:
            if (one := saved()) is not None:  # else its gradient is there already
                self._file.write(data, one.place)
                self.written_bytes += data.nbytes
                one.data = None
        except OSError as error:
            self._error = _failed(self.folder, error)
        finally:
            with self.room:
                self._waiting -= data.nbytes
                self.room.notify_all()

    def _read(self, place: int, like: Tensor) -> Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        try:
            self._file.read(made, place)
        except OSError as error:
            raise _failed(self.folder, error) from error
        return made


class _OnDisk(Saved):
    # At ``place`` of the file, behind those of its pass in ``chain``.
    def __init__(self, spill: Spill, data: Tensor, place: int, chain: Chain) -> None:
        self.spill, self.place, self.chain, self.index = spill, place, chain, len(chain)
        self.like = data.to("meta")
        self.data: Tensor | None = data  # until it is written
        self.written: Future[None]
        self._read: Future[Tensor] | None = None
        self._is_ahead = False

    def tensor(self) -> Tensor:
        self.spill.require_whole()
        data = self.data
        if data is None:
            self.written.result()
            self._read = self._read or self.spill.read(self)
        self._read_ahead()
        if data is None and self._read is not None:
            data = self._read.result()
        self._count_ahead(False)
        assert data is not None
        return data

    def _read_ahead(self) -> None:
        # The pass needs next what it saved before this.
        for index in range(self.index - 1, -1, -1):
            if self.spill.ahead_bytes >= MOST_AHEAD:
                return
            one = self.chain[index]()
            if isinstance(one, _OnDisk) and one._read is None and one.written.done():
                one._count_ahead(True)
                one._read = self.spill.read(one)

    def _count_ahead(self, is_ahead: bool) -> None:
        with self.spill.room:
            if is_ahead != self._is_ahead:
                self._is_ahead = is_ahead
                self.spill.ahead_bytes += self.like.nbytes if is_ahead else -self.like.nbytes

    def __del__(self) -> None:
        self._count_ahead(False)
        self.spill.free(self.place, self.like.nbytes)


class BlankSpill(Keeper):
    """Counts what would be spilled, where tensors have shapes and no memory."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def keep(self, data: Tensor, chain: Chain) -> Saved:
        """Lets a tensor go."""
        return _Blank(self, data)


class _Blank(Saved):
    def __init__(self, spill: BlankSpill, data: Tensor) -> None:
        self.spill, self.shape, self.stride = spill, data.shape, data.stride()
        self.dtype, self.num_bytes = data.dtype, data.nbytes
        self._made: Tensor | None = None
        spill.now += self.num_bytes
        spill.most = max(spill.most, spill.now)

    def tensor(self) -> Tensor:
        if self._made is None:
            self._made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return self._made

    def __del__(self) -> None:
        self.spill.now -= self.num_bytes


def _failed(folder: Path, error: OSError) -> RunError:
    why = error.strerror or str(error)
    return RunError(
        f"memory.spill={folder} cannot keep activations: {why}; name a folder on a disk with more "
        f"room, or keep fewer of them with memory.checkpoint=block"
    )


def _close(writer: ThreadPoolExecutor, reader: ThreadPoolExecutor, file: NamelessFile) -> None:
    for pool in (writer, reader):
        pool.shutdown(wait=True, cancel_futures=True)
    file.close()
