"""Modes around a plain module: equal random numbers, and what changes its gradients."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import unittest.mock
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class SameRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every random operator draw the same numbers, whatever the order of its tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        torch.manual_seed(0)
        plain = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
        made = func(*plain, **kwargs)
        if args and isinstance(args[0], Tensor) and made is plain[0]:
            return args[0].copy_(plain[0])
        return made


class OwnGradients(TorchFunctionMode):
    """Collects what may change gradients in a module's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = False  # whether a tensor got a hook
        self.functions: dict[str, None] = {}  # names of autograd functions of the user's

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function."""
        if func is Tensor.register_hook:
            self.hooks = True
        return func(*args, **(kwargs or {}))

    def note(self, output: Tensor) -> None:
        """Adds the autograd functions of the user's that an output comes from."""
        seen, ahead = set(), [output.grad_fn]
        while ahead:
            function = ahead.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            if isinstance(function, BackwardCFunction):
                forward = type(function)._forward_cls
                if forward.__module__.partition(".")[0] != "torch":
                    self.functions[forward.__name__] = None
            ahead += [following for following, _ in function.next_functions]


@contextlib.contextmanager
def entropy_reads() -> Iterator[list[str]]:
    """Yields a list that names what a block seeds from the system, as a new generator does."""
    reads: list[str] = []
    read, seed = os.urandom, random.Random.seed

    def noted_read(size: int) -> bytes:
        reads.append("os.urandom")
        return read(size)

    def noted_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            reads.append("random.Random()")
        seed(generator, a, version)

    # The first is what SystemRandom, secrets and NumPy's unseeded generators call.
    with (
        unittest.mock.patch.object(random, "_urandom", noted_read),
        unittest.mock.patch.object(random.Random, "seed", noted_seed),
    ):
        yield reads


def generator_states() -> dict[int, bytes]:
    """Returns the states of all generators of random numbers of Python and NumPy, by identity."""
    kinds, states = (random.Random, np.random.Generator, np.random.RandomState), {}
    shared = [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    for generator in [*gc.get_objects(), *shared]:
        if issubclass(type(generator), kinds):
            with contextlib.suppress(Exception):  # of the system, which have no state
                states[id(generator)] = pickle.dumps(generator)
    return states
