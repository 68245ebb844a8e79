"""Refuses arguments of operations: what each must be, and what would work."""

from __future__ import annotations

import datetime
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends.backend import RESERVED_TAGS, TAGS
from hires.comm.comm_world import Group
from hires.core.errors import CommError
from hires.plan.routes import Route

MOST_S = 1e9
"""Longest time limit, of thirty years: libraries count it in nanoseconds."""


def require_members(ranks: Sequence[int], rank: int) -> None:
    """Raises CommError where a rank is not in a group."""
    if rank not in ranks:
        raise CommError(f"rank {rank!r} is not among ranks {[*ranks]}; name one of these")


def require_one_each(
    tensors: Sequence[Tensor], group: Group, like: Tensor | None = None, root: int = -1
) -> None:
    """Raises CommError where tensors are not one for each rank, all of the type of ``like``.

    This rank's has the size of ``like``. Without it they are of the type of the first. ``root``:
    the rank that gives them, and all others none.
    """
    if root >= 0 and isinstance(group, Group) and group.world.rank != root:
        if tensors:
            raise CommError(
                f"rank {group.world.rank} gives {len(tensors)} tensors, and only rank {root} may; "
                "give None"
            )
        return
    if not isinstance(group, Group):
        raise wrong_argument(group, None, None)
    if not isinstance(tensors, list | tuple):
        raise CommError(f"{tensors!r:.60} is no list; give a list of one tensor for each rank")
    if len(tensors) != group.size:
        raise CommError(
            f"{len(tensors)} tensors for the {group.size} ranks {group.ranks}; give one for each"
        )
    for tensor in tensors:
        require_type(tensor, tensors[0] if like is None else like)
    if like is not None and group.index >= 0:
        require_size(tensors[group.index], like.nbytes, like)


def require_type(tensor: Tensor, like: Tensor) -> None:
    """Raises CommError where a tensor is of another type than ``like``."""
    # They travel as bytes, which are no numbers of another type.
    bytes_of(tensor)
    bytes_of(like)
    if tensor.dtype != like.dtype:
        raise CommError(f"tensors of {tensor.dtype} and {like.dtype}; give tensors of one type")


def require_size(tensor: Tensor, num_bytes: int, like: Tensor) -> None:
    """Raises CommError where a tensor has another size, or another type than ``like``."""
    require_type(tensor, like)
    if tensor.nbytes != num_bytes:
        raise CommError(f"expected a tensor of {num_bytes} bytes, got one of {tensor.nbytes}")


def require_rows(tensor: Tensor, like: Tensor) -> None:
    """Raises CommError where rows of a tensor have another size, or another type, than ``like``."""
    require_type(tensor, like)
    widths = [one.shape[1:].numel() for one in (tensor, like) if one.numel()]
    if len({*widths}) > 1:
        raise CommError(f"rows of {widths[0]} numbers and of {widths[1]}; give rows of one size")


def require_backends(backends: Any) -> None:
    """Raises CommError where the backends of a start are no names."""
    is_list = isinstance(backends, Sequence) and not isinstance(backends, str)
    if not is_list or not backends or not all(isinstance(name, str) for name in backends):
        raise CommError(f"backends {backends!r:.60} are no list of names; give one as ['gloo']")


def seconds_of(timeout: Any) -> float:
    """Returns a time limit in seconds; CommError: it is none that a wait can have."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= MOST_S:  # also of a NaN
        raise CommError(
            f"a limit of {timeout!r:.60} s is none; give a number over 0, up to {MOST_S:.0e}"
        )
    return float(timeout)


def members_of(ranks: Any, every: Group) -> list[int]:
    """Returns the ranks of a new group in ascending order; CommError: it cannot be one."""
    try:
        given = [*ranks]
        members = sorted(map(operator.index, given)) if all(map(is_whole, given)) else []
    except TypeError:
        members = []
    # A rehearsal, and a plan whose ranks are one process, have a world of one.
    stranger = every.size > 1 and not {*members} <= {*every.ranks}
    if stranger or len({*members}) < len(members) or not members:
        raise CommError(
            f"ranks {members or ranks!r:.60} are no group of a world of {every.size}; name some of "
            f"ranks 0 to {every.size - 1}, each once"
        )
    return members


def require_counts(*every: Sequence[int] | None) -> None:
    """Raises CommError where split sizes are no list of whole numbers from 0."""
    for sizes in every:
        known = sizes is None or isinstance(sizes, list | tuple)
        if not known or any(not is_whole(size) or size < 0 for size in sizes or ()):
            raise CommError(f"split sizes {sizes!r:.60} are no list of whole numbers from 0")


def is_whole(number: Any) -> bool:
    """Whether a value is a whole number, and no truth value."""
    return hasattr(number, "__index__") and not isinstance(number, bool)


def bytes_of(tensor: Tensor) -> int:
    """Returns the size of a tensor; CommError: it is none, or its numbers lie in several."""
    if not isinstance(tensor, Tensor):
        raise CommError(f"expected a torch.Tensor, got {tensor!r:.60}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        layout = str(tensor.layout).removeprefix("torch.")
        kind = "nested" if tensor.is_nested else layout
        kind = str(tensor.dtype) if tensor.is_quantized else kind
        raise CommError(
            f"a tensor that is {kind} has no numbers that lie one behind the other; "
            "send to_dense(), dequantize() or the tensors in it"
        )
    return tensor.nbytes


def message_bytes(tensor: Tensor, tag: int) -> int:
    """Returns the size of the tensor of a message of users; CommError: it is none, or its tag."""
    # A send of 16 B takes a few microseconds, so the size and the tag are checked in one call.
    if tag.__class__ is not int or not 0 <= tag < RESERVED_TAGS:
        require_tag(tag)
    return bytes_of(tensor)


def require_tag(tag: int) -> None:
    """Raises CommError where a tag is none, or one of the messages of hires itself."""
    if not hasattr(tag, "__index__"):
        raise CommError(f"tag {tag!r:.60} is no whole number; give one from 0")
    if not 0 <= tag < RESERVED_TAGS:
        raise CommError(
            f"tag {tag} is not among those of users, 0 to {RESERVED_TAGS - 1}: hires has messages "
            f"of its own under {RESERVED_TAGS} to {TAGS - 1}"
        )


def wrong_argument(group: Any, choice: Any, peer: Any) -> CommError:
    """Returns the error of a group, a backend or a rank that is none."""
    if not isinstance(group, Group):
        return CommError(f"expected a group, got {group!r:.60}; make one with hires.comm.new_group")
    if choice is not None and not isinstance(choice, str | Route):
        return CommError(
            f"expected the name of a backend, {', '.join(group.world.backends)}, got {choice!r:.60}"
        )
    return CommError(f"expected a rank, one of {group.ranks}, got {peer!r:.60}")
