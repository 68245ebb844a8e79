"""Stands for TensorRT: its engine is the exported graph, saved by torch, which torch runs."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram


class ExportLibrary:
    """Builds and runs engines on the CPU, and counts both."""

    name = "a stand-in"

    def __init__(self, **facts: Any) -> None:
        self.given, self.built, self.loaded = facts, 0, 0
        self.programs: list[ExportedProgram] = []

    def facts(self) -> dict[str, Any]:
        return self.given

    def build(self, program: ExportedProgram, inputs: Sequence[Tensor]) -> bytes:
        assert all(one.is_contiguous() for one in inputs)
        self.built += 1
        self.programs.append(program)
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are parts of others
            torch.export.save(program, file)
        return file.getvalue()

    def load(self, data: bytes, outputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        self.loaded += 1
        module = torch.export.load(io.BytesIO(data)).module()

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                made: tuple[Tensor, ...] = module(*inputs)
            for one, like in zip(made, outputs, strict=True):
                assert (one.shape, one.dtype) == (like.shape, like.dtype)
            return tuple(one.contiguous() for one in made)

        return run
