"""Refuses hooks on layers that ranks, which compute operators, would never call."""

from __future__ import annotations

from torch import nn

from hires.core.errors import ConfigError

_KINDS = ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook")


def refuse_hooks(model: nn.Module) -> None:
    """Raises ConfigError if a module, one of its layers, or all modules have hooks on calls.

    Those of torch.nn.utils, as of weight_norm, compute weights and are part of the plan.
    """
    for kind in _KINDS:
        if getattr(nn.modules.module, f"_global_{kind}s"):
            raise ConfigError(_HOOKED.format("every module", f"module_{kind}"))
        for path, module in model.named_modules():
            hooks = getattr(module, f"_{kind}s").values()
            if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
                raise ConfigError(_HOOKED.format(path or "the module", kind))


_HOOKED = (
    "{} has a hook (register_{}) that would never be called: ranks compute operators, not layers; "
    "remove it, or read the layer where the plain module is called. Hooks on parameters are "
    "called, and those on what hires.shard returns"
)
