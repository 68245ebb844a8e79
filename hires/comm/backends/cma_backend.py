"""Carries messages between ranks of one machine that read each other's memory (Linux).

Small things pass through shared memory, as in the backend ``shm``: sums of few bytes, and the
addresses of tensors. Each rank then reads what it needs from where it lies, in one copy, and all
meet once more before their tensors may change (:mod:`~hires.comm.backends.attach`):

    1  share   all ranks give the addresses and sizes of their tensors
    2  read    each reads its parts from the others
    3  meet    all reads are finished
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends import attach, rounds
from hires.comm.backends.attach import PeerMemory
from hires.comm.backends.host_memory import copy
from hires.comm.backends.peer_messages import Pull
from hires.comm.backends.shm_backend import ShmBackend, ShmGroup
from hires.core.errors import CommError


class CmaBackend(ShmBackend):
    """The functions of torch.distributed by reading the memory of the other ranks."""

    name = "cma"

    def pull(self, among: ShmGroup) -> Pull:
        """Returns what reads other ranks' memory; CommError: the system forbids it."""
        peers = self._peers_of(among)
        if not peers.works:
            raise CommError(f"backend cma reads the memory of other ranks: {attach.refusal()}")
        self._peers = {among.number: peers}
        return peers.read

    def destroy_group(self, group: ShmGroup) -> None:
        """Gives the memory of a group back."""
        super().destroy_group(group)
        self._peers.pop(group.number, None)

    def share_in(
        self, among: ShmGroup, given: Tensor | None, taken: Sequence[Tensor | None]
    ) -> None:
        """Gives all ranks one tensor, or none, and fills one from each."""
        self._exchange(among, [given], [(tensor, 0) for tensor in taken])

    def deal_in(
        self, among: ShmGroup, given: Sequence[Tensor | None], taken: Sequence[Tensor | None]
    ) -> None:
        """Gives each rank its tensor, and fills one from each."""
        given = given or [None] * len(among.ranks)
        self._exchange(among, given, [(tensor, among.index) for tensor in taken])

    def reduce_in(self, among: ShmGroup, tensor: Tensor, op: Any, takes: bool) -> None:
        """Reduces a tensor over all ranks, in place; ``takes``: this one needs the result."""
        if tensor.nbytes <= rounds.WHOLE_BYTES:
            super().reduce_in(among, tensor, op, takes)
        else:
            self._peers_in(among).reduce([tensor], op, takes)

    def reduce_scatter_in(
        self, among: ShmGroup, output: Tensor, given: Sequence[Tensor], op: Any
    ) -> None:
        """Gives each rank its term, and reduces those of all."""
        places = torch.tensor([(tensor.data_ptr(), tensor.nbytes) for tensor in given])
        addresses, sizes = _gather(among, places)[:, among.index].unbind(1)
        for rank, size in enumerate(sizes.tolist()):
            if size != output.nbytes:
                raise among.require_rounds().mismatch(rank, size, output.nbytes)
        own = given[among.index].view(-1)
        self._peers_in(among).reduce_from(own, output.view(-1), addresses.tolist(), op)
        _meet(among)

    def _exchange(
        self,
        among: ShmGroup,
        given: Sequence[Tensor | None],
        taken: Sequence[tuple[Tensor | None, int]],
    ) -> None:
        # ``taken``: of each rank a tensor, and which of those that it gives.
        places = [(0, 0) if one is None else (one.data_ptr(), one.nbytes) for one in given]
        table, peers = _gather(among, torch.tensor(places)).tolist(), self._peers_in(among)
        for rank, (tensor, which) in enumerate(taken):
            if tensor is None:
                continue
            there, size = table[rank][which]
            if size != tensor.nbytes:
                raise among.require_rounds().mismatch(rank, size, tensor.nbytes)
            if rank == among.index:
                copy(tensor.data_ptr(), there, size)
            else:
                peers.read(rank, tensor.data_ptr(), there, size)
        _meet(among)

    def _peers_in(self, among: ShmGroup) -> PeerMemory:
        # The first large operation of a group makes it; all its ranks come to that.
        if among.number not in self._peers:
            self._peers[among.number] = self._peers_of(among)
        return self._peers[among.number]

    def _peers_of(self, among: ShmGroup) -> PeerMemory:
        return PeerMemory(lambda tensor: _gather(among, tensor), among.index, among.ranks)


def _gather(among: ShmGroup, tensor: Tensor) -> Tensor:
    gathered = tensor.new_empty((len(among.ranks), *tensor.shape))
    among.require_rounds().share(tensor, [*gathered.unbind(0)])
    return gathered


def _meet(among: ShmGroup) -> None:
    among.require_rounds().barrier()
