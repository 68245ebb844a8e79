"""Digests the plain values that a network and its source files hold beside parameters and buffers.

They decide what is traced: sizes, factors, constants. An equal digest lets a trace be used again;
a value that differs each time, as an identifier, costs a new trace and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hires.nets.built_tensors import digest_of

MOST_VALUES = 200_000
"""Values that are looked at; the others of a larger network do not count."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPEN = ("collections", "types", "pathlib", "argparse", "enum")
"""Modules of Python's own whose objects are looked into."""
_EMPTY = types.CellType()


def digest_of_state(model: nn.Module, sources: Iterable[str]) -> str:
    """Returns 16 digits of the values in a network, and in the modules of the user's by name."""
    state = _State(sources)
    state.add({name: None for name, _ in model.named_parameters()})
    state.seen |= {id(t) for t in (*model.parameters(), *model.buffers())}
    state.add(model)
    for name in sorted(state.modules):
        state.add(vars(sys.modules[name]))
    return state.whole.hexdigest()[:16]


class _State:
    # What was seen of the values so far.
    def __init__(self, sources: Iterable[str]) -> None:
        self.modules = {name for name in sources if name in sys.modules}
        self.whole = hashlib.sha256()
        self.seen: set[int] = set()
        self.kept: list[Any] = []  # so that no identity is used twice
        self.left = MOST_VALUES

    def add(self, item: Any) -> None:
        """Adds a value and those in it; each object once."""
        ahead = [item]
        while ahead and self.left:
            item, self.left = ahead.pop(), self.left - 1
            if isinstance(item, _PLAIN):
                self.whole.update(f"{type(item).__name__} {item!r}\0".encode(errors="replace"))
            elif id(item) in self.seen:
                self.whole.update(b"again\0")
            else:
                self.seen.add(id(item))
                self.kept.append(item)
                ahead += self._parts(item)

    def _parts(self, item: Any) -> list[Any]:
        # Adds what an object is; returns what it holds.
        kind = type(item)
        self.whole.update(f"{kind.__module__}.{kind.__qualname__}\0".encode())
        if isinstance(item, Tensor):
            return self._tensor(item)
        if isinstance(item, np.ndarray) and not item.dtype.hasobject:
            self.whole.update(np.ascontiguousarray(item).tobytes())
            return [item.shape, str(item.dtype)]
        if isinstance(item, types.FunctionType):
            cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY]
            return [item.__qualname__, item.__defaults__, item.__kwdefaults__, *cells]
        if isinstance(item, functools.partial):
            return [item.func, item.args, item.keywords]
        if isinstance(item, type):
            own = item.__module__ in self.modules
            return [item.__qualname__, *([dict(vars(item))] if own else [])]
        if isinstance(item, (dict, types.MappingProxyType)):
            return [part for pair in item.items() for part in pair]
        if isinstance(item, (list, tuple)):
            return list(item)
        if isinstance(item, (set, frozenset)):
            return sorted(map(repr, item)) if all(isinstance(i, _PLAIN) for i in item) else []
        closed = kind.__module__.partition(".")[0] in sys.stdlib_module_names - {*_OPEN}
        held = getattr(item, "__dict__", None)
        return [] if closed or not isinstance(held, dict) else [held]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        facts = [str(tensor.dtype), list(tensor.shape)]
        has_numbers = tensor.layout is torch.strided and not tensor.is_meta
        return [*facts, digest_of(tensor)] if has_numbers else facts
