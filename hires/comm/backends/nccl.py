"""Carries tensors of GPUs with NCCL, and those of the host, as agreements, with gloo.

Each group has one library of both, which its members connect without torch's default group. It was
never run on several GPUs: tests replace NCCL by a stand-in with its semantics.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.backend import Post
from hires.comm.backends.gloo_backend import GlooBackend, GlooGroup
from hires.comm.backends.rendezvous import WorldMeeting
from hires.core.errors import CommError

_ABORT_S = 10.0
"""How long NCCL may take to end what is under way."""


class NcclBackend(GlooBackend):
    """Collectives and messages of GPUs, which pass streams in the order of posting."""

    name = "nccl"
    gathers_quickly = True
    devices = ("cpu", "cuda")

    def __init__(self) -> None:
        super().__init__()
        self._of_devices: list[Any] = []

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Joins the world; CommError: this torch or this machine has no NCCL."""
        if not dist.is_nccl_available():
            raise CommError("this torch has no NCCL; use comm.backend=gloo, or a torch with CUDA")
        super().join(meeting, timeout_s)

    def new_channel(self, ranks: list[int]) -> GlooGroup:
        """Makes a group for messages alone, which has a communicator and a stream of its own."""
        index = ranks.index(self.rank) if self.rank in ranks else -1
        group = GlooGroup(ranks, index, self.everyone.timeout_s, None)
        self._add_device(group)
        return group

    def destroy_group(self, group: GlooGroup) -> None:
        """Ends the communicators of a group."""
        super().destroy_group(group)
        if group.of_devices is not None:
            self._of_devices.remove(group.of_devices)
            group.of_devices.shutdown()

    def destroy_process_group(self) -> None:
        """Leaves the world."""
        super().destroy_process_group()
        for library in self._of_devices:
            library.shutdown()
        self._of_devices.clear()

    def abort(self) -> None:
        """Ends what is under way on all communicators, whose kernels would run for ever."""
        libraries = [*self._of_devices]

        def end() -> None:
            for library in libraries:
                library.abort()

        # In a thread, since ncclCommAbort may wait for a network that is gone.
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def isend(self, tensor: Tensor, dst: int, group: GlooGroup | None = None, tag: int = 0) -> Any:
        """Begins to send a tensor."""
        if tensor.is_cpu:
            return super().isend(tensor, dst, group, tag)
        [work] = self.begin_together([Post(True, tensor, dst, group, tag)])
        return work

    def irecv(self, tensor: Tensor, src: int, group: GlooGroup | None = None, tag: int = 0) -> Any:
        """Begins to receive a tensor."""
        if tensor.is_cpu:
            return super().irecv(tensor, src, group, tag)
        [work] = self.begin_together([Post(False, tensor, src, group, tag)])
        return work

    def begin_together(self, posts: Sequence[Post]) -> list[Any]:
        """Begins messages of one group and kind of device, on a GPU as one group call."""
        among = self.everyone if posts[0].group is None else posts[0].group
        library = self._library(among, posts[0].tensor)
        if library is among.library:
            return super().begin_together(posts)
        library._start_coalescing()
        for post in posts:
            post_one = library.send if post.sends else library.recv
            post_one([post.tensor], among.place(post.peer), 0)
        return [library._end_coalescing()] * len(posts)

    def _group(self, ranks: list[int], timeout_s: float) -> GlooGroup:
        group = super()._group(ranks, timeout_s)
        self._add_device(group)
        return group

    def _add_device(self, group: GlooGroup) -> None:
        if group.index < 0:
            return
        store = rendezvous.part(self._store, f"nccl {self._numbers.next(group.ranks)}")
        # StreamWaits name the operation that is late. NCCL's own watchdog ends the process and
        # names none. It counts from the post, so it gets twice the time.
        patience = datetime.timedelta(seconds=2 * group.timeout_s)
        group.of_devices = self._connected(store, group.index, len(group.ranks), patience)
        self._of_devices.append(group.of_devices)

    def _connected(self, store: Any, index: int, size: int, patience: datetime.timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        return dist.ProcessGroupNCCL(store, index, size, options)

    def _library(self, group: GlooGroup, tensor: Tensor) -> Any:
        near = tensor.is_cpu and group.library is not None
        return group.library if near else group.of_devices
