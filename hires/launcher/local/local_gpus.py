"""Divides the GPUs of this machine among runs that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LocalGpus:
    """The GPUs of this machine, by the names of CUDA_VISIBLE_DEVICES."""

    names: Sequence[str]
    each_bytes: int | None = None
    """Memory of each; None: unknown, so no two runs share one."""

    def choose(self, needs: Sequence[int], held: Mapping[str, int]) -> list[str] | None:
        """Returns a GPU of its own for each need of a run; None: it has to wait.

        ``needs`` are bytes, 0 if unknown; ``held`` are those of the runs under way, by GPU. The
        largest need takes the emptiest GPU: if that is too full, no other choice fits either.

        >>> LocalGpus("0123", 40).choose([10, 30], {"0": 20, "1": 35})
        ['3', '2']
        >>> LocalGpus("01", 40).choose([20, 10], {"0": 20, "1": 35}) is None
        True
        """
        emptiest = sorted(self.names, key=lambda name: (name in held, held.get(name, 0)))
        largest = sorted(range(len(needs)), key=lambda index: -needs[index])
        if len(needs) > len(emptiest):
            return None
        chosen = dict(zip(largest, emptiest, strict=False))
        fits = all(self._fits(needs[index], name, held) for index, name in chosen.items())
        return [chosen[index] for index in range(len(needs))] if fits else None

    def _fits(self, need: int, name: str, held: Mapping[str, int]) -> bool:
        if name not in held:  # the plan was compared with an empty GPU
            return True
        known = need and held[name] and self.each_bytes is not None
        return bool(known) and need + held[name] <= (self.each_bytes or 0)
