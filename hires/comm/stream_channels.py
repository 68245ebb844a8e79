"""Opens a plan's communicators where backends have streams, and waits for what they carry."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hires.comm.backends.group_calls import Channels
from hires.comm.backends.stream_waits import StreamWaits
from hires.comm.guarded_waits import waiting
from hires.comm.transport import Group, has_streams, transport
from hires.core.errors import CommError
from hires.plan.channels import Channel


def open_channels(
    channels: Sequence[Channel], groups: dict[int, Group], device: torch.device
) -> None:
    """Makes the plan's communicators where the backend has streams; all ranks call it together.

    They and those of the groups are connected here: a later connection would make a rank wait
    inside a post, which the proof does not model.
    """
    if not has_streams():
        return
    if device.type != "cpu":
        transport.streams = StreamWaits(device, transport.timeout_s)
    for number in sorted(groups):  # all ranks come to the groups in one order
        if groups[number].size > 1:
            first = functools.partial(
                transport.backend.all_reduce,
                torch.zeros(1, device=device),
                group=groups[number].handles[transport.default],
            )
            what, ranks = f"the first sum among ranks {groups[number].ranks}", groups[number].ranks
            waiting(first, what)
            if transport.streams is not None:
                transport.streams.add(what, tuple(ranks))
                finish_streams()
    streams = transport.streams, finish_streams
    make = functools.partial(Channels, transport.backend, channels, device, *streams)
    transport.channels = waiting(make, "the first messages on each channel")


def opened_channels() -> Channels | None:
    """Returns the communicators of the plan that this rank opened last, or now uses."""
    return transport.channels


def use_channels(channels: Channels | None) -> None:
    """Makes messages take the communicators of another plan that all ranks have opened."""
    transport.channels = channels


def finish_streams() -> None:
    """Returns when the device has completed all operations that its streams wait for.

    CommError: nothing ended for the longest wait, or the device reports an error. What is under way
    is aborted then, so that neither the device nor the end of this process waits for it.
    """
    streams = transport.streams
    while streams is not None and (first := streams.oldest()) is not None:
        try:
            waiting(streams.finish_oldest, first.what, ranks=first.ranks)
        except CommError:
            transport.backend.abort()
            raise
