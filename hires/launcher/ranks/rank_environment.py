"""Which environment variables does a rank get?"""

from __future__ import annotations

from collections.abc import Mapping

from hires.core.ranks.world import World


def rank_environment(
    base: Mapping[str, str],
    world: World,
    threads: int,
    interface: str | None,
    site: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the environment of a rank.

    Args:
        base: what it inherits.
        world: which rank it is.
        threads: its compute threads.
        interface: network interface of its messages, unless ``base`` names one; None: it finds out.
        site: variables of the cluster's file, for those that ``base`` does not name.
    """
    # Under torchrun these tell torch that somebody else hosts the meeting point: nobody would.
    environ = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_")}
    environ |= world.to_environment()
    environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return {**(site or {}), **environ}
