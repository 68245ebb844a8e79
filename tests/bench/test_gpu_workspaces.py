"""Is cuDNN's workspace measured with the options of the library that it is compared with?"""

from __future__ import annotations

import pytest
import torch

from hires.bench import gpu_workspaces
from hires.bench.gpu_workspaces import workspace_share


class Counters:
    """Stands for ``torch.cuda``: a convolution needs its output and 1024 bytes."""

    def __init__(self) -> None:
        self.options: set[tuple[bool, bool]] = set()

    def synchronize(self) -> None:
        cudnn = torch.backends.cudnn
        self.options.add((cudnn.deterministic, cudnn.allow_tf32))

    def reset_peak_memory_stats(self) -> None:
        pass

    def memory_allocated(self) -> int:
        return 4096

    def max_memory_allocated(self) -> int:
        return 4096 + 16 * 8 * 8 * 4 + 1024


@pytest.mark.parametrize(("in_hires", "options"), [(True, (True, False)), (False, (False, True))])
def test_workspace_is_that_of_each_librarys_options(monkeypatch, in_hires, options):
    cudnn = torch.backends.cudnn
    before, counters = (cudnn.deterministic, cudnn.allow_tf32), Counters()
    monkeypatch.setattr(gpu_workspaces, "SIDE", 8)
    share = workspace_share(in_hires, counters, "cpu")
    assert share == 1024 / ((64 + 16) * 8 * 8 * 4)
    assert counters.options == {options}
    assert (cudnn.deterministic, cudnn.allow_tf32) == before
