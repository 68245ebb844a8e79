"""Defines a codec, which makes the numbers of messages smaller: facts without torch, and kernels.

To add one: a module in ``hires.codecs`` with its class, and a test. What a message holds is made of
flat numbers and written to a buffer of bytes; the config says which messages (:data:`KINDS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hires.core.errors import ConfigError
from hires.core.registry import Registry, offer

if TYPE_CHECKING:
    from torch import Tensor

GRADIENT, HALO, STAGE, JOIN, PARAMETERS = "gradient", "halo", "stage", "join", "parameters"
KINDS = {
    GRADIENT: "sums of gradients",
    HALO: "pixels, and their gradients, between ranks of a stage",
    STAGE: "values, and their gradients, between stages of as many ranks",
    JOIN: "the same between stages of different numbers of ranks",
    PARAMETERS: "updates of parameters from the rank that made them (optimizer.shard)",
}
"""Messages that a codec may serve. Statistics, losses and agreements have none."""
NONE = "none"


class Codec:
    """Codes flat tensors of real numbers as bytes; one instance serves all threads."""

    summary: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = (*KINDS,)
    """Messages that it may serve."""
    block: ClassVar[int] = 1
    """Numbers that share what is kept of them together; no two tensors share a block."""
    unit: ClassVar[float | None] = 0.0
    """Most by which it changes a number, as a part of the number, or of the root mean square of its
    block where these are normal; 0: not at all; None: it has no bound."""
    called: str = ""
    """Its name in :data:`CODECS`."""
    leaves: ClassVar[bool] = False
    """Whether it leaves a part of gradients out, which their rank adds to its next ones. Codes of
    all ranks are gathered then, and each rank sums what it decodes."""

    def num_bytes(self, numbers: int) -> int:
        """Returns the bytes of so many numbers."""
        raise NotImplementedError

    def encode(self, numbers: Tensor, codes: Tensor) -> None:
        """Writes flat numbers of any real type to ``num_bytes`` bytes, of type uint8."""
        raise NotImplementedError

    def decode(self, codes: Tensor, numbers: Tensor) -> None:
        """Fills flat numbers of any real type."""
        raise NotImplementedError

    def padded(self, numbers: int) -> int:
        """Returns the numbers of whole blocks."""
        return -(-numbers // self.block) * self.block


CODECS: Registry[type[Codec]] = Registry("codec", "hires.codecs")
"""Value of ``comm.codec`` -> the codec."""


def codec_named(name: str) -> Codec:
    """Returns a codec; ConfigError: there is none of that name."""
    codec = CODECS[name]()
    codec.called = name
    return codec


def codecs_of(setting: Any) -> dict[str, str]:
    """Returns the codec of each kind of message that has one, as ``comm.codec`` names them.

    ConfigError: it names no kind or codec that there is, or one for what it cannot serve.
    """
    names = [NONE, *CODECS]
    if isinstance(setting, str):
        _require("comm.codec", setting, names)
        return dict.fromkeys(() if setting == NONE else CODECS[setting].kinds, setting)
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"comm.codec={setting!r} must be a codec, as bf16, or one for each kind of message, as "
            f"{{gradient: int8}}"
        )
    for kind, name in setting.items():
        if kind not in KINDS:
            raise ConfigError(
                f"comm.codec={{{kind}: {name}}}: unknown kind of message {kind!r}; "
                f"{offer(str(kind), KINDS)}"
            )
        _require(f"comm.codec={{{kind}: {name}}}", name, names)
        if name != NONE and kind not in CODECS[name].kinds:
            able = [one for one in CODECS if kind in CODECS[one].kinds]
            raise ConfigError(
                f"comm.codec={{{kind}: {name}}}: {name} serves {', '.join(CODECS[name].kinds)}; "
                f"for {kind} choose one of {', '.join([NONE, *able])}"
            )
    return {str(kind): name for kind, name in setting.items() if name != NONE}


def _require(key: str, name: Any, names: list[str]) -> None:
    if name not in names:
        raise ConfigError(f"{key}: unknown codec {name!r}; {offer(str(name), names)}")
