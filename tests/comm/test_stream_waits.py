"""A rank whose neighbour hangs ends with the name of what a stream of its GPU waits for."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch

from hires import comm
from hires.comm.backends import stream_waits
from hires.comm.backends.group_calls import Channels
from hires.comm.backends.nccl import BOTH, NcclBackend
from hires.comm.backends.stream_waits import StreamWaits
from hires.comm.stream_channels import finish_streams, open_channels
from hires.comm.transport import Group, transport
from hires.core.errors import CommError
from hires.engine.device import open_device
from hires.parallel.loss_scale import LossScale
from hires.plan.channels import Channel
from tests.helpers.fake_nccl import HARD_TIMEOUT_S, Call, ThreadBackend, Wire

CPU = torch.device("cpu")
HALOS = [Channel("the halos of stage 0", ((0, 1), (1, 0)))]


class Stream:
    """The compute stream of one rank: what it waits for, and events behind that."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def module(self) -> Any:
        """Returns what stands for ``torch.cuda``."""
        calls = self.calls

        class Event:
            def record(self) -> None:
                self.behind = list(calls)

            def query(self) -> bool:
                return not any(call.open for call in self.behind)

        return type("Module", (), {"Event": Event})


class StreamBackend(ThreadBackend):
    """As NCCL, whose waits are those of a stream."""

    has_streams = True
    aborted = 0

    def __init__(self, rank: int, wire: Wire, stream: Stream) -> None:
        super().__init__(rank, wire)
        self.stream = stream

    def batch_isend_irecv(self, ops: list[Any]) -> list[Any]:
        """Begins a group call, for which the process never waits."""
        calls = super().batch_isend_irecv(ops)
        wait = self.stream.calls.extend
        return [type("Work", (), {"wait": lambda self: wait(calls)})()]

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any, async_op: bool = False) -> Any:
        """Begins a sum that never ends."""
        never = Call(self.rank, [], self.wire)
        never.open = [None]  # type: ignore[list-item]
        self.stream.calls.append(never)

    def abort(self) -> None:
        """Counts."""
        self.aborted += 1


@pytest.fixture
def rank_0(monkeypatch) -> StreamBackend:
    """Rank 0 of two, which is on a device with streams."""
    wire, stream = Wire(), Stream()
    monkeypatch.setattr(stream_waits.torch, "get_device_module", lambda device: stream.module())
    backend, other = StreamBackend(0, wire, stream), ThreadBackend(1, wire)
    waits = StreamWaits(CPU, HARD_TIMEOUT_S)
    monkeypatch.setattr(transport, "backends", {"nccl": backend})
    monkeypatch.setattr(transport, "stagings", {})
    monkeypatch.setattr(transport, "streams", waits)
    thread = threading.Thread(target=Channels, args=(other, HALOS, CPU))
    thread.start()
    channels = Channels(backend, HALOS, CPU, waits, finish_streams)
    thread.join()
    waits.timeout_s = 0.05
    monkeypatch.setattr(transport, "channels", channels)
    return backend


def test_message_of_a_rank_that_hangs_is_named_with_its_channel(rank_0):
    sent, received = torch.ones(3), torch.zeros(3)
    both = {"recv": received, "send": sent}
    handles = [comm.post(kind, tensor, 1, 7, channel=1) for kind, tensor in both.items()]
    comm.end_call()
    for handle in handles:
        handle.wait()  # returns at once
    what = r"a group call with rank 1 on the channel of the halos of stage 0 failed: it has not"
    with pytest.raises(CommError, match=what):
        comm.finish_streams()
    assert rank_0.aborted == 1
    comm.finish_streams()  # nothing is left to wait for


def test_sum_that_never_ends_is_named_before_the_host_reads_a_gradient(rank_0, monkeypatch):
    comm.all_reduce(torch.ones(3), group=Group([0, 1], 0, {"nccl": None}))
    seen, finish = [], StreamWaits.finish_oldest

    def look(self: StreamWaits) -> None:
        seen.append(comm.activity.now)  # what the heartbeat shows
        finish(self)

    monkeypatch.setattr(StreamWaits, "finish_oldest", look)
    with pytest.raises(CommError, match=r"an all-reduce among ranks \[0, 1\] .*failed"):
        LossScale(1).agree([torch.ones(1)])
    assert (seen[0].what, seen[0].ranks) == ("an all-reduce among ranks [0, 1]", (0, 1))


def test_first_message_of_a_rank_that_hangs_is_named(rank_0):
    with pytest.raises(CommError, match="on the channel of the halos of stage 0 failed: it has"):
        Channels(rank_0, HALOS, CPU, transport.streams, finish_streams)


@pytest.mark.parametrize("later", [False, True])
def test_error_of_the_device_has_the_name_of_its_operation(rank_0, monkeypatch, later):
    """As an illegal access or a lost link, which CUDA reports at any later call."""
    waits, broken = transport.streams, []
    assert waits is not None

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            if broken:
                raise RuntimeError("CUDA error: unspecified launch failure\nand much advice")
            return False

    monkeypatch.setattr(waits, "_module", type("Module", (), {"Event": Event}))
    waits._free.clear()
    waits.add("a sum", (0, 1))
    broken.append(True)
    if later:
        waits.add("a message", (1,))
    with pytest.raises(CommError, match=r"^a sum failed: CUDA error: unspecified launch failure$"):
        comm.finish_streams()
    assert rank_0.aborted == 1
    comm.finish_streams()  # nothing is left to wait for


def test_device_that_takes_no_event_names_the_operation(rank_0, monkeypatch):
    def refuse(self: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(transport.streams, "_free", [])
    monkeypatch.setattr(transport.streams._module.Event, "record", refuse)
    with pytest.raises(CommError, match="a sum failed on the device: CUDA error"):
        transport.streams.add("a sum", (0, 1))


def test_channels_on_a_device_bound_the_waits_of_its_streams(monkeypatch):
    """The first sum of every group is waited for, and named if it never ends."""
    device, named = open_device("simulated", 0), []

    class Backend(ThreadBackend):
        has_streams = True

        def all_reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
            assert (tensor.device.type, group) == ("simulated", "the sums")

    monkeypatch.setattr(transport, "backends", {"nccl": Backend(0, Wire())})
    monkeypatch.setattr(transport, "streams", None)
    monkeypatch.setattr(transport, "channels", None)
    monkeypatch.setattr(transport, "timeout_s", 7.0)
    finish = StreamWaits.finish_oldest
    monkeypatch.setattr(
        StreamWaits,
        "finish_oldest",
        lambda self: (named.append((self.oldest().what, self.timeout_s)), finish(self)),
    )
    groups = {2: Group([0, 1], 0, {"nccl": "the sums"}), 4: Group([0], 0, {})}
    open_channels([], groups, device.torch)
    assert named == [("the first sum among ranks [0, 1]", 7.0)]
    assert isinstance(transport.streams, StreamWaits)
    assert transport.channels is not None
    open_channels([], {}, CPU)


def test_nccl_alone_has_the_double_time():
    """A rank says first what it waits for; gloo and the rendezvous keep to comm.timeout_s."""
    given: list[Any] = []

    class Half:
        def __init__(self, device: torch.device) -> None:
            self.device = device.type

        def _set_default_timeout(self, timeout: Any) -> None:
            given.append((self.device, timeout.total_seconds()))

    made = type("ProcessGroup", (), {"_get_backend": lambda self, device: Half(device)})()

    class Library:
        group = type("group", (), {"WORLD": made})

        def is_nccl_available(self) -> bool:
            return True

        def init_process_group(self, backend: str, place: str, timeout: Any, *_: Any) -> None:
            given.append((backend, timeout.total_seconds()))

        def new_group(self, ranks: list[int], timeout: Any, backend: str) -> Any:
            given.append((backend, timeout.total_seconds()))
            return made if 0 in ranks else torch.distributed.GroupMember.NON_GROUP_MEMBER

    backend = NcclBackend(Library())
    backend.join("tcp://127.0.0.1:1", 5.0, 2, 0)
    assert given == [(BOTH, 5.0), ("cuda", 10.0)]
    given.clear()
    backend.new_group([0, 1])
    backend.new_group([1])
    backend.new_group([0, 1], datetime.timedelta(hours=1))
    assert given == [(BOTH, 5.0), ("cuda", 10.0), (BOTH, 5.0), (BOTH, 3600.0)]
    given.clear()
    backend.new_channel([0, 1])
    assert given == [("nccl", 10.0)]


def test_events_of_a_device_end_in_order_and_are_used_again():
    device = open_device("simulated", 0)
    waits = StreamWaits(device.torch, 0.05)
    source = device.host_empty([4], torch.float32).fill_(2.0)
    target = torch.empty(4, device=device.torch)
    waits.add("a sum", (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device.module.current_stream()), "finish", lambda *_: None)
        target.copy_(source, non_blocking=True)
        waits.add("a message", (1,))
        first = waits.oldest()
        assert first is not None
        assert (first.what, first.ranks) == ("a message", (1,))
        with pytest.raises(CommError, match=r"not ended on the device for 0\.05 s"):
            waits.finish_oldest()
    assert waits.oldest() is None
    device.synchronize()


def test_abort_ends_all_groups_and_never_blocks(monkeypatch):
    monkeypatch.setattr("hires.comm.backends.nccl._ABORT_S", 0.05)
    ended, kept = [], threading.Event()

    def end() -> None:
        ended.append(True)
        kept.wait(10)

    core = type("Core", (), {"_abort_process_group": staticmethod(end)})
    NcclBackend(type("Library", (), {"distributed_c10d": core})).abort()
    kept.set()
    assert ended == [True]
    assert hasattr(torch.distributed.distributed_c10d, "_abort_process_group")
