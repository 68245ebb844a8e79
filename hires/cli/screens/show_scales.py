"""Says what ``quant.auto`` has found."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hires.cli.screens.screen import plural
from hires.core.config.precision_config import MIN_MAX
from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError
from hires.core.store import file_names
from hires.core.store.records import read_config
from hires.quant.scales import Scales, read_scales


def auto_lines(config: RunConfig, scales: Scales) -> list[str]:
    """Returns what ``quant.auto`` asked for and what the int8 network has of it, if it is set."""
    key = f"quant.auto={config.quant.auto}"
    if config.quant.auto is None:
        return []
    if not scales.auto:
        why = "the log of the calibration's rank 0 says why"
        return [f"warning: {key}: the int8 network itself could not be measured; {why}"]
    asked, images = scales.auto["asked_db"], int(scales.auto["images"])
    signal, left = scales.auto.get("signal_db"), int(scales.auto.get("operators", 0))
    other = f"calibrate with quant.observer={MIN_MAX}, which cuts no range off, or "
    remedy = f"{other if scales.observer != MIN_MAX else ''}ask for less than {asked:.1f} dB"
    if not left and not any(why.startswith("quant.auto") for why in scales.kept.values()):
        why = "no operator can be computed in 8 bits, or quant.keep names them all"
        return [f"warning: {key} had nothing to choose from: {why}"]
    if not left:
        return [f"warning: {key} leaves nothing in 8 bits, all is computed in float; {remedy}"]
    has = "no noise" if signal is None else f"{signal:.1f} dB of signal over noise"
    first = "image" if images == 1 else f"{images} images"
    text = f"the int8 network itself has {has} on the first {first}"
    operators = f"{plural(left, 'operator')} in 8 bits"
    if signal is None or signal >= asked:
        return [f"{key}: {text}, {asked:.1f} dB was the bound; {operators}"]
    less = f"{asked - signal:.1f} dB less"
    return [f"warning: {key} was not reached: {text}, {less}; {operators}; {remedy}"]


def auto_lines_of(run: Path, attempt: int) -> list[str]:
    """Returns the same of an attempt of ``task=calibrate``; nothing of another run."""
    with contextlib.suppress(HiresError):  # a folder of an older hires, or a damaged one
        config = read_config(run)
        if config.task.name == "calibrate":
            path = file_names.attempt_dir(run, attempt) / file_names.SCALES
            return auto_lines(config, read_scales(path))
    return []
