"""Codes the gradients of a DistributedDataParallel of torch (:mod:`hires.core.codecs`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.comm.coding import usual_codec
from hires.comm.plan_messages import all_reduce_coalesced
from hires.core.errors import CommError


def compress(module: Any, codec: str) -> None:
    """Lets gradients of a DDP module travel as codes, as ``bf16``; all ranks call it before a pass.

    All ranks get the same bits. What ``topk`` leaves of them stays with the module, and is in no
    checkpoint of it.

    Raises:
        ConfigError: there is no such codec.
        CommError: the ranks of the module are no group of the backend ``hires``.
    """
    group = module.process_group
    if (kind := torch.distributed.get_backend(group)) != "hires":
        raise CommError(
            f"compress() needs a module whose ranks send through hires, not {kind}: call "
            f'init_process_group("hires") before'
        )
    kept: dict[Any, Tensor] = {}
    one, ranks, route = usual_codec(codec), group._group, group._route

    def mean(bucket: Any) -> Any:
        flat = bucket.buffer()
        parts = [*torch.split(flat, [gradient.numel() for gradient in bucket.gradients()])]
        left = [kept.setdefault(p, torch.zeros_like(part)) for p, part in pairs(bucket, parts)]
        all_reduce_coalesced(parts, ranks, backend=route, codec=one, left=left)
        future = torch.futures.Future[Tensor]()
        future.set_result(flat.div_(ranks.size))
        return future

    def pairs(bucket: Any, parts: list[Tensor]) -> Any:
        return zip(bucket.parameters(), parts, strict=True) if one.leaves else ()

    # torch compares annotations, which are texts here: those of a lambda are none.
    module.register_comm_hook(None, lambda state, bucket: mean(bucket))
