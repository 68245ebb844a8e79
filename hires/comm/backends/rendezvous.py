"""Lets the ranks of a world meet in a store, one for all its backends."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import datetime
import hashlib
import itertools
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hires.comm.backends.stores import FolderStore, signed
from hires.comm.backends.works import pauses, wait
from hires.core.errors import PeerError
from hires.core.ranks import meeting
from hires.core.ranks.meeting import interface_towards
from hires.core.ranks.world import World

log = logging.getLogger(__name__)

_library: Any = torch._C._distributed_c10d
_held: list[WorldMeeting] = []  # those that this process has not left
_served: list[Any] = []  # the last one, as long as no other is served: another rank may be early
_worlds: collections.Counter[tuple[Any, ...]] = collections.Counter()  # at one address
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_POLL_S, _SPARE_S, _LOOK_S = 0.01, 1.0, 0.5


def choose_interface(world: World) -> None:
    """Makes gloo and NCCL use the network that leads to the other machines, if there are any.

    Else gloo would take that of this host's own name, which is often the loopback, and NCCL any.
    """
    apart = world.local_size < world.size
    if apart and _GLOO_INTERFACE not in os.environ and (own := interface_towards(world.address)):
        os.environ[_GLOO_INTERFACE] = own
        os.environ.setdefault(_NCCL_INTERFACE, f"={own}")  # without = also ib0 means ib0.1


class GroupNumbers:
    """Numbers groups alike on all their members, whatever other groups each rank makes."""

    def __init__(self) -> None:
        self._made: collections.Counter[str] = collections.Counter()

    def next(self, ranks: Sequence[int]) -> int:
        """Returns the number of one more group of these ranks, below 2^63."""
        text = ",".join(map(str, ranks))
        self._made[text] += 1
        digest = hashlib.blake2b(f"{text} {self._made[text]}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class WorldMeeting:
    """The meeting of the ranks of a world, as one of them; they meet when it is first used.

    Ranks of one machine have a file in a folder that no other user can enter. Else rank 0 serves a
    store at the address of the world, unless torchrun does, and every text carries a proof of the
    world's secret, if it has one.

    ``shared``: a store that ranks of several machines have already. ``words`` tell the world from
    others at its address.
    """

    def __init__(self, world: World, shared: Any = None, words: str = "") -> None:
        self.world, self._shared, self._words = world, shared, words
        self._met: _Met | None = None

    def part(self, name: str, timeout_s: float) -> Any:
        """Returns the part of the store that belongs to ``name``.

        ``timeout_s``: longest wait in the store from now on. CommError: a rank does not come in
        that time, or a text carries no proof of the secret.
        """
        if self._met is None:
            self._met = self._meet(timeout_s)
            _held.append(self)
        self._met.store.set_timeout(datetime.timedelta(seconds=timeout_s))
        return part(self._met.store, name)

    @property
    def second(self) -> Any:
        """A connection for another thread; None: they have not met.

        Only keys that are there may be read.
        """
        return None if self._met is None else self._met.second

    def memory_name(self, *texts: str) -> str:
        """Returns the name of a file that the ranks share, which only they can compute."""
        assert self._met is not None
        return meeting.proof(self._met.secret, "memory", *texts).hex()

    def leave(self) -> None:
        """Leaves; what rank 0 made goes."""
        met, self._met = self._met, None
        if met is not None:
            _held.remove(self)
            met.ends.close()

    def _meet(self, timeout_s: float) -> _Met:
        world, until = self.world, time.monotonic() + timeout_s
        if world.size == 1:
            return _Met(_library.HashStore(), secrets.token_hex(16))
        if world.local_size == world.size:
            return _meet_here(world, self._words, until)
        return _meet_between(world, self._shared, self._words, until)


def agent_serves(world: World, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent serves the store at the address of the world."""
    place = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return serves and place == (world.address, str(world.port))


@dataclass(frozen=True)
class _Met:
    """Where ranks have met, and a secret that is new for them."""

    store: Any
    secret: str
    second: Any = None
    """A connection of its own for calls in another thread."""
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def _meet_here(world: World, words: str, until: float) -> _Met:
    facts = world.secret, words, world.address, str(world.port), str(world.size)
    name = meeting.proof("name", *facts).hex()
    while True:
        with contextlib.ExitStack() as ends:
            if world.rank == 0:
                secret = ends.enter_context(meeting.held(name, until))
            else:
                secret = _found(name, world, until)
            path = meeting.private_folder() / secret / "store"
            if not path.parent.is_dir():  # rank 0 has just left the one before this
                continue
            whole = _library.FileStore(str(path), -1)
            # Its destructor looks for the file and then opens it, and aborts the process if rank 0
            # has removed it in between; so it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(whole))
            with contextlib.suppress(ValueError):  # a rank may find the one before this
                _roll_call(whole, world, until, path.parent.is_dir)
                return _Met(whole, secret, FolderStore(path.parent), ends.pop_all())
        time.sleep(_POLL_S)


def _found(name: str, world: World, until: float) -> str:
    secret = ""

    def is_there() -> bool:
        nonlocal secret
        secret = meeting.found(name)
        return bool(secret)

    if not wait(is_there, until - time.monotonic(), pauses(_POLL_S)):
        raise PeerError(
            f"rank 0 has not come in time to the meeting of {world.size} ranks in "
            f"{meeting.private_folder()}; ranks in containers must share that folder"
        )
    return secret


def _meet_between(world: World, whole: Any, words: str, until: float) -> _Met:
    serves = world.rank == 0 and not agent_serves(world)
    if whole is not None:
        whole = whole.clone()  # its timeout is the caller's
    else:
        whole = _connected(world, serves, until)
        if serves:  # a rank of the next world may connect before this one leaves
            _served[:] = [whole]
    # It may outlive the world, and the next one must not read what this one has left.
    place = world.address, world.port, world.size, words
    _worlds[place] += 1
    name = f"hires, {world.size} ranks, world {_worlds[place]} {words}"
    second, whole = part(whole.clone(), f"{name}, calls"), part(whole, name)
    where = f"{world.address}:{world.port}"
    if not world.secret and world.rank == 0:
        log.warning(
            "ranks of several machines meet at %s without a secret: who reaches that port can "
            "disturb them. Set %s to the same random text on all; shared memory is used within "
            "each machine only",
            where,
            meeting.VARIABLE,
        )
    calls = _roll_call(signed(whole, world.secret, where), world, until)
    # New for each world: what a stranger has read in an earlier one proves nothing.
    secret = world.secret and meeting.proof(world.secret, "world", calls).hex()
    return _Met(signed(whole, secret, where), secret, signed(second, secret, where))


def _connected(world: World, serves: bool, until: float) -> Any:
    # torch waits without limit for the first answer of what accepts a connection there.
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left_s = max(0.0, until - time.monotonic())
    facts = world.address, world.port, None, serves, datetime.timedelta(seconds=left_s)

    def connect() -> None:
        try:
            answers.put(_library.TCPStore(*facts, wait_for_workers=False, multi_tenant=True))
        except (RuntimeError, ValueError) as error:
            answers.put(error)

    threading.Thread(target=connect, name="connect", daemon=True).start()
    try:
        answer = answers.get(timeout=left_s + _SPARE_S)  # torch's own error comes first
    except queue.Empty:
        raise PeerError(
            f"{world.address}:{world.port} accepts connections and has not answered in time: rank "
            f"0 is stopped, or another program listens there"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _roll_call(
    whole: Any, world: World, until: float, stands: Callable[[], bool] = lambda: True
) -> str:
    # Returns random texts of all ranks, once all have come. A ValueError: this one's is not among
    # them, or the store stands no more, so the meeting is over, or of others. Without its folder a
    # FileStore waits its whole timeout, so a look at it is short.
    own, keys = secrets.token_hex(16), [f"rank {rank}" for rank in range(world.size)]

    def limit() -> None:
        left_s = max(0.001, until - time.monotonic())
        whole.set_timeout(datetime.timedelta(seconds=min(_LOOK_S, left_s)))

    def take(key: str) -> str:
        while True:
            limit()
            try:
                return str(whole.get(key).decode())
            except RuntimeError:
                if not stands():
                    raise ValueError("the meeting is over") from None
                if time.monotonic() > until:
                    absent = [key for key in keys if not whole.check([key])] or [key]
                    raise PeerError(f"{', '.join(absent)} has not come in time") from None

    limit()
    try:
        whole.set(keys[world.rank], own)
    except RuntimeError:
        if stands():
            raise
        raise ValueError("the meeting is over") from None
    if world.rank == 0:
        whole.set("all", json.dumps([own, *map(take, keys[1:])]))
    text = take("all")
    if json.loads(text)[world.rank] != own:
        raise ValueError(f"another rank {world.rank} has met there")
    return text


def meet_members(whole: Any, ranks: Sequence[int], index: int, limit_s: float) -> None:
    """Returns once all ranks of a group have come to a part of a store that is theirs alone.

    PeerError names those that have not come in time, or the one that waits no more. One value
    decides for all: else a rank that gives up would leave another to go on without it.
    """
    keys = [f"at {rank}" for rank in ranks]
    whole.set(keys[index], "")
    try:
        whole.wait(keys, datetime.timedelta(seconds=limit_s))
        absent = []
    except RuntimeError:
        absent = [rank for rank, key in zip(ranks, keys, strict=True) if not whole.check([key])]
    own = f"rank {ranks[index]} has given up after {limit_s:g} s" if absent else "met"
    decision = whole.compare_set("decision", "", own).decode()
    if decision != "met" and absent:
        raise PeerError(f"rank {', '.join(map(str, absent))} has not come in time")
    if decision != "met":
        raise PeerError(f"{decision}, before this rank came; make the group again on all its ranks")


def part(whole: Any, name: str) -> Any:
    """Returns a part of a store whose keys no other part has."""
    return _library.PrefixStore(name, whole)


def texts(whole: Any, num_ranks: int, index: int) -> Callable[..., list[str]]:
    """Returns a function that exchanges texts of some ranks, in a part of a store for them alone.

    The first rank collects the texts and hands them out together, so that a call costs each other
    rank two looks at the store. It deletes what all have read. The call of ranks that leave now is
    ``is_last``: no text is handed out, and the first rank, with which the store may go, returns
    when the others have read what came before.
    """
    rounds = itertools.count()

    def exchange(text: str, is_last: bool = False) -> list[str]:
        number = next(rounds)
        own = part(whole, f"texts {number}")
        if index == 0:
            others = [_get(own, str(rank), rank) for rank in range(1, num_ranks)]
            if is_last:
                return []
            own.set("all", json.dumps([text, *others]))
            for rank in range(1, num_ranks):
                own.delete_key(str(rank))
            if number:  # the others are here, so they have read what came before
                part(whole, f"texts {number - 1}").delete_key("all")
        else:
            own.set(str(index), text)
            if is_last:
                return []
        return list(json.loads(_get(own, "all", 0)))

    return exchange


def _get(own: Any, key: str, member: int) -> str:
    try:
        return str(own.get(key).decode())
    except RuntimeError as error:
        raise PeerError(f"member {member} of the group did not answer in time") from error


def torch_world(world: World, timeout_s: float) -> None:
    """Makes the default group of torch.distributed, over gloo, for what is built on that."""
    rank, patience = world.rank, datetime.timedelta(seconds=timeout_s)
    own = WorldMeeting(world, words="torch").part("torch", timeout_s)
    dist.init_process_group("gloo", None, patience, world.size, rank, own)


@atexit.register
def leave_all() -> None:
    """Leaves the meetings of this process."""
    for one in [*_held]:
        one.leave()
