"""Reads which tensors of which shapes a checkpoint holds, from the headers of its files.

Source:
    https://github.com/huggingface/safetensors, README, "Format": eight bytes with the length of the
    header, little-endian, then the header as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store.checkpoints import Checkpoint, DamagedError

Shape = list[int]
_LENGTH_BYTES = 8
_MAX_HEADER = 10**8
"""Bytes of a header; the format allows no more."""
_SHOWN = 3
"""Tensors that one error names."""


def shapes_in(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Returns the shapes of a checkpoint's parameters and buffers, by name.

    Raises:
        DamagedError: a file cannot be read, or is no safetensors file.
    """
    shapes: dict[str, Shape] = {}
    for name in checkpoint.files:
        if name.startswith("stage"):
            shapes |= _header(checkpoint.path / name)
    return shapes


def refuse_other_network(
    there: list[Checkpoint], needed: Mapping[str, Shape], source: str | None
) -> None:
    """Refuses a checkpoint that holds other layers than a network has.

    Args:
        there: the checkpoints that may be taken, the best first; the first that is whole counts.
        needed: the shapes of the network's parameters and buffers, in the order of its layers.
        source: what ``checkpoint.resume`` names.

    Raises:
        ConfigError: names the first layers that differ.
    """
    for checkpoint in there:
        try:
            held = shapes_in(checkpoint)
        except DamagedError:
            continue  # the ranks skip it, too
        wrong = [_difference(n, held.get(n), s) for n, s in needed.items() if held.get(n) != s]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ConfigError(
                f"checkpoint.resume={source}: {checkpoint.name} is of another network: "
                f"{'; '.join(wrong[:_SHOWN])}{more}; use the model and model.classes of its run"
            )
        return


def _difference(name: str, there: Shape | None, here: Shape) -> str:
    return f"{name} is {there} there and {here} here" if there else f"it has no {name}"


def _header(path: Path) -> dict[str, Shape]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER:
                raise DamagedError(f"{path} is damaged: its header would have {length} bytes")
            values = json.loads(file.read(length))
        return {
            name: [int(size) for size in entry["shape"]]
            for name, entry in values.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise DamagedError(f"{path} is damaged: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: its header makes no sense ({error})") from None
