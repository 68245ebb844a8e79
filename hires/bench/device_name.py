"""Names the device of a benchmark for its tables and its JSON."""

from __future__ import annotations

import torch

from hires.core.ranks import gpus


def device_name(kind: str) -> str:
    """Returns the kind of a device; of ``cuda`` the first GPU and the versions of its software."""
    if kind != "cuda":
        return kind if kind == "cpu" else f"{kind} (a rehearsal: nothing of it ran on a GPU)"
    gpu = torch.cuda.get_device_properties(0)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return (
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, driver {gpus.driver()}, "
        f"CUDA {torch.version.cuda}, cuDNN {cudnn}"
    )
