"""Tests of networks share the machine: one thread is enough for images of a few pixels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keeps torch to one thread."""
    torch.set_num_threads(1)
