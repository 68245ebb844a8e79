"""A backend over files, as a user would add it in ``hires.backends``; nothing else is changed."""

from __future__ import annotations

from typing import Any

from hires.core.message_backends import BACKEND_FACTS, BackendFacts


def opened() -> Any:
    import collections
    import datetime
    import tempfile
    from pathlib import Path

    import torch
    from torch import Tensor

    from hires.comm.backends.backend import Backend, Members
    from hires.comm.backends.rendezvous import GroupNumbers, WorldMeeting
    from hires.comm.backends.works import pauses, wait
    from hires.core.errors import PeerError

    class Message:
        """A file that a rank has written, or waits for."""

        def __init__(self, path: Path, tensor: Tensor | None, limit_s: float) -> None:
            self._path, self._tensor, self._limit_s = path, tensor, limit_s

        def is_completed(self) -> bool:
            if self._tensor is not None and self._path.exists():
                data = bytearray(self._path.read_bytes())
                if len(data) != self._tensor.nbytes:
                    raise PeerError(f"{len(data)} bytes came for {self._tensor.nbytes}")
                if data:
                    given = torch.frombuffer(data, dtype=torch.uint8)
                    self._tensor.view(-1).view(torch.uint8).copy_(given)
                self._path.unlink()
                self._tensor = None
            return self._tensor is None

        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            limit_s = self._limit_s if timeout is None else timeout.total_seconds()
            if not wait(self.is_completed, limit_s, pauses(1e-3)):
                raise PeerError(f"it took over {limit_s:g} s")
            return True

    class FileGroup(Members):
        """Some ranks, with the number that the names of their files begin with."""

        number = 0

    class FileBackend(Backend):
        """Messages as files; collectives are those of every backend."""

        def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
            store, self.rank = meeting.part("files", timeout_s), meeting.world.rank
            if self.rank == 0:
                store.set("folder", tempfile.mkdtemp())
            self._folder, self._numbers = Path(store.get("folder").decode()), GroupNumbers()
            self._sent: collections.Counter[str] = collections.Counter()
            self.everyone = self._group([*range(meeting.world.size)], timeout_s)

        def _group(self, ranks: list[int], timeout_s: float) -> FileGroup:
            index = ranks.index(self.rank) if self.rank in ranks else -1
            group = FileGroup(ranks, index, timeout_s)
            group.number = self._numbers.next(ranks)
            return group

        def new_group(self, ranks: list[int], timeout: Any = None) -> FileGroup:
            return self._group(ranks, self.limit_s(timeout))

        def _place(self, ends: tuple[int, int], group: FileGroup, tag: int) -> Path:
            way = f"{group.number}-{ends[0]}-{ends[1]}-{tag}"
            self._sent[way] += 1
            return self._folder / f"{way}-{self._sent[way]}"

        def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Message:
            among = self.members(group)
            path = self._place((self.rank, dst), among, tag)
            written = path.with_name(f"{path.name}.new")
            written.write_bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes())
            written.rename(path)
            return Message(path, None, among.timeout_s)

        def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Message:
            among = self.members(group)
            return Message(self._place((src, self.rank), among, tag), tensor, among.timeout_s)

        def barrier(self, group: Any = None, async_op: bool = False) -> Any:
            empty = [torch.empty(0)] * len(self.members(group).ranks)
            return self.exchange(empty, empty, group, async_op)

    return FileBackend


BACKEND_FACTS.register("files")(
    BackendFacts("Files in a temporary folder of one machine", opened, one_machine=True)
)
