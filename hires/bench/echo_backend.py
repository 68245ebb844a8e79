"""Sends every message of a rank back to itself: one process runs the program of any rank.

NCCL needs a GPU for each rank. With one GPU a rank is its own neighbour: the communicators, group
calls, streams and waits are those of a run, and each receive is filled by a send of the same call.
That works for a rank that sends as much as it receives in every call, as the middle one of three
equal tiles:

    plan    tile 0 --3 rows--> tile 1 --3 rows--> tile 2        here    tile 1 --3 rows--> tile 1
            tile 0 <--2 rows-- tile 1 <--2 rows-- tile 2                tile 1 --2 rows--> tile 1

A sum of one rank leaves its tensor as it is, and a gather repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.nccl import NcclBackend


class Post(NamedTuple):
    """One side of a message."""

    function: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any


class EchoBackend(NcclBackend):
    """The backend of one rank of a plan whose other ranks are itself."""

    def __init__(self, rank: int, library: Any = dist) -> None:
        super().__init__(library)
        self._rank = rank
        self.num_messages = 0

    def get_rank(self) -> int:
        """Returns the rank of the plan."""
        return self._rank

    def new_group(self, ranks: Any = None, timeout: Any = None, members_only: bool = False) -> Any:
        """Makes a group of this process."""
        return super().new_group([0], timeout)

    def new_channel(self, ranks: list[int]) -> Any:
        """Makes a communicator of this process."""
        return super().new_channel([0])

    def P2POp(self, function: Any, tensor: Tensor, peer: int, group: Any) -> Post:  # noqa: N802
        """Returns one side of a message to or from this process."""
        return Post(function, tensor, 0, group)

    def batch_isend_irecv(self, posts: Sequence[Post]) -> Any:
        """Begins a group call; sends meet receives of their size, in the order of posting."""
        # The k-th send of a rank to itself fills its k-th receive, whichever tile each is meant
        # for; rows for the tile above and the tile below may differ in number.
        sizes: list[list[Post]] = []
        for function in (self._library.isend, self._library.irecv):
            own = [post for post in posts if post.function is function]
            sizes.append(sorted(own, key=lambda post: post.tensor.nbytes))
        sends, receives = sizes
        bytes_each_way = [[post.tensor.nbytes for post in one] for one in sizes]
        assert bytes_each_way[0] == bytes_each_way[1], "a call that does not fill its own receives"
        self.num_messages += len(sends)
        ops = [self._library.P2POp(*post) for post in (*receives, *sends)]
        return self._library.batch_isend_irecv(ops)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        """Fills the part of every rank with this one's tensor."""
        for part in output_tensor.view(-1, *input_tensor.shape).unbind(0):
            super().all_gather_into_tensor(part, input_tensor, group)


class Copies:
    """Stands for torch.distributed with NCCL in a world of one process: messages are copies.

    ``late``: what a message or sum fills holds NaN until it is waited for, so that a read before
    the wait is seen in the numbers.
    """

    P2POp = Post

    def __init__(self, late: bool = False) -> None:
        self._late = late
        self.group = _World

    def is_nccl_available(self) -> bool:
        """Returns that it stands for one that is."""
        return True

    def is_initialized(self) -> bool:
        """Returns that there is no world to leave."""
        return False

    def init_process_group(self, *args: Any) -> None:
        """Does nothing: the world has one process."""

    def new_group(self, *args: Any) -> _Alone:
        """Returns a group of this process."""
        return _Alone()

    @staticmethod
    def isend() -> None:
        """Marks a send of a group call."""

    @staticmethod
    def irecv() -> None:
        """Marks a receive of a group call."""

    def batch_isend_irecv(self, posts: Sequence[Post]) -> list[_Copy]:
        """Begins the copies of a group call."""
        sends = [post.tensor for post in posts if post.function is self.isend]
        receives = [post.tensor for post in posts if post.function is self.irecv]
        return [
            _Copy(source, target, self._late)
            for source, target in zip(sends, receives, strict=True)
        ]

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> _Copy | None:
        """Sums over one rank."""
        return _Copy(tensor, tensor, self._late) if async_op else None

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        """Fills the part of the one rank."""
        output.copy_(tensor)


class _Alone:
    """A process group and its backend; copies have no timeout."""

    def _get_backend(self, device: torch.device) -> _Alone:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass


class _World:
    WORLD = _Alone()


class _Copy:
    def __init__(self, source: Tensor, target: Tensor, late: bool) -> None:
        self._sent, self._target = source.clone(), target
        if late:
            target.view(-1).view(torch.uint8).fill_(255)  # NaN in every real type
        else:
            self.wait()

    def wait(self) -> None:
        """Fills the target."""
        self._target.copy_(self._sent)
