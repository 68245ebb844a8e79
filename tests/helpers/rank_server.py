"""What the fork server of ranks has imported, computed once and set aside before it forks."""

from __future__ import annotations

import gc

import torch

import tests.helpers.jobs
import tests.helpers.saved  # noqa: F401
from hires.engine.memory_meter import load_lazy_parts
from tests.helpers.warm_up import trace_something

torch.set_num_threads(1)  # a fork has no other thread
load_lazy_parts()
trace_something()
# Collections in a rank need not look at, and so copy, the pages that it shares.
gc.collect()
gc.freeze()
