"""Reads, checks and writes the scales of a quantised network; pure Python, the front end plans so.

    FILE.json           {"version": 2, "network": digest, "source": digest, "observer": "entropy",
                         "images": 256, "values": {value: [scale, zero point]},
                         "ranges": {value: [low, high]},
                         "kept": {node: reason}, "noise": {value: dB},
                         "weights": digest of FILE.safetensors, "linear": "static" or "dynamic",
                         "auto": {"asked_db", "signal_db", "images", "operators"},
                         "alone": {node: dB}, both of quant.auto, else empty,
                         "min_max_noise": {value: dB}, where it is much more than "noise"}
    FILE.safetensors    the quantised weights, beside it

Names are those of the fused float graph (:mod:`hires.plan.passes.rewriting`). Other people's files
are read, too: every number is checked before anything is planned with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.config.quant_config import DYNAMIC, LINEAR, STATIC
from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import INFERENCE
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.core.store.checkpoints import first_of
from hires.core.store.file_names import MIB, StrPath
from hires.core.store.files import write_atomically
from hires.core.store.naming import identity, plain
from hires.core.store.network_weights import FLOATS, SAFETENSORS, WeightsPlace, find_weights
from hires.core.store.reading import read_named
from hires.quant.affine import LAST, Affine

VERSION = 2
SUFFIX = ".json"
_WEIGHT_END = ":weight8"
"""How the names of a quantised network's weights end (``hires.plan.passes.int8_tensors``)."""
_MOST_BYTES = 64 * MIB
MARK = "hires.scales"
"""Key of the safetensors file's metadata: :attr:`Scales.mark` of the scales beside it."""
AUTO = ("asked_db", "signal_db", "images", "operators")
"""Names of :attr:`Scales.auto`."""
_OBJECTS = ("values", "ranges", "kept", "noise", "auto", "alone", "min_max_noise")
"""What the file holds by names."""
_REMEDY = "make it again with `hires quantize`"


@dataclass(frozen=True)
class Scales:
    """What a calibration found."""

    network: str
    """Digest of the network that was calibrated (``hires.plan.passes.int8_scales``)."""
    observer: str
    images: int
    values: Mapping[str, Affine]
    """How the unsigned integers of each value stand for real numbers."""
    ranges: Mapping[str, tuple[float, float]]
    """The ranges that these scales cover."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Nodes that stay in float, with the reason."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Signal over the noise that its scale adds to each value, in dB, as measured."""
    weights: str = ""
    """Digest of the safetensors file beside them that holds the quantised network; empty: they are
    scales alone."""
    source: str = ""
    """Digest of what decides them (:func:`calibration_key`)."""
    linear: str = STATIC
    """For which linear layers it holds tensors: with static or dynamic scales of their input."""
    auto: Mapping[str, float] = field(default_factory=dict)
    """What ``quant.auto`` asked for (``asked_db``) and what the int8 network has of it, as measured
    on its first ``images``: the signal of its output over the noise (``signal_db``, absent if there
    is no noise), and how many ``operators`` it has in 8 bits; or nothing."""
    alone: Mapping[str, float] = field(default_factory=dict)
    """The same signal if one node alone is in 8 bits, of each that ``quant.auto`` measured; not of
    those that add no noise, or after which the output is not finite."""
    min_max_noise: Mapping[str, float] = field(default_factory=dict)
    """What :attr:`noise` would be with the observer min_max, of values that lose much by theirs."""

    def text(self) -> str:
        """Returns what the file holds."""
        facts = {
            "version": VERSION,
            "network": self.network,
            "source": self.source,
            "observer": self.observer,
            "images": self.images,
            "values": {name: list(one) for name, one in self.values.items()},
            "ranges": {name: list(one) for name, one in self.ranges.items()},
            "kept": dict(self.kept),
            "noise": dict(self.noise),
            "weights": self.weights,
            "linear": self.linear,
            "auto": dict(self.auto),
            "alone": dict(self.alone),
            "min_max_noise": dict(self.min_max_noise),
        }
        return json.dumps(facts, indent=1, allow_nan=False) + "\n"

    @property
    def digest(self) -> str:
        """16 digits that differ where the scales do."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    @property
    def mark(self) -> str:
        """16 digits of the scales without ``weights``, in whatever order.

        The safetensors file stores them, so that a mismatched pair is detected.
        """
        facts = json.loads(self.text())
        del facts["weights"]
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_scales(path: StrPath, scales: Scales, option: str = "out=FILE") -> None:
    """Writes a file that is there as a whole or not at all."""
    write_atomically(path, scales.text(), option=option)


def read_scales(path: StrPath, key: str = "") -> Scales:
    """Returns what a file holds; ConfigError: it is missing, damaged or hostile.

    ``key`` is what names the file in the config, for the error.
    """
    name = key or str(path)
    try:
        held = json.loads(read_named(path, _MOST_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; make it with `hires quantize`") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
        raise ConfigError(f"{name} holds no whole JSON ({why}); {_REMEDY}") from None
    try:
        return _checked(held)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise ConfigError(f"{name} is damaged ({why}); {_REMEDY}") from None


def scales_place(config: RunConfig) -> tuple[Path, str] | None:
    """Returns the file of a run's scales and the key that names it; None: it has none yet.

    ``quant.scales`` names it, or it stands beside ``weights=FILE.safetensors``.
    """
    if config.quant.scales:
        return Path(config.quant.scales), f"quant.scales={config.quant.scales}"
    file = Path(config.weights or "")
    beside = file.with_suffix(SUFFIX) if file.suffix in SAFETENSORS else None
    if beside is not None and beside.is_file():
        return beside, f"weights={config.weights}: {beside}"
    return None


def scales_of(config: RunConfig) -> Scales | None:
    """Returns the scales of a run, or None if it has none yet; ConfigError: they are unusable."""
    place = scales_place(config)
    return None if place is None else read_scales(*place)


def stored_scales(config: RunConfig) -> Scales | None:
    """Returns the scales of a run whose ``weights`` are the file of a quantised network.

    ConfigError: that file needs another precision, its scales are missing or damaged, or
    ``quant.scales`` names others. Another JSON file beside float weights is none of its business.
    """
    file = Path(config.weights or "")
    if file.suffix not in SAFETENSORS:
        return None
    beside, holds_numbers = file.with_suffix(SUFFIX), _holds_numbers(file)
    if holds_numbers and not beside.is_file():
        raise ConfigError(
            f"weights={file} holds a quantised network, and {beside} with its scales is missing; "
            f"copy it from where `hires quantize` wrote both, or make both again"
        )
    if not beside.is_file():
        return None
    try:
        scales = read_scales(beside, f"weights={file}: {beside}")
    except ConfigError:
        if holds_numbers:
            raise
        return None
    if not scales.weights:
        return None
    if config.precision.name != INT8 or config.task.name in ("train", "calibrate"):
        raise ConfigError(
            f"weights={file} holds a quantised network; use it with task={', '.join(INFERENCE)} "
            f"and precision={INT8}, and the file that it was made from for everything else"
        )
    if config.quant.linear == DYNAMIC != scales.linear:
        raise ConfigError(
            f"quant.linear={DYNAMIC} does not go with weights={file}, which holds linear layers "
            f"with static scales; leave it out, make another file with `hires quantize "
            f"quant.linear={DYNAMIC}`, or give the float weights and "
            f"quant.scales={file.with_suffix(SUFFIX)}"
        )
    if config.quant.scales not in (None, str(file.with_suffix(SUFFIX))):
        raise ConfigError(
            f"quant.scales={config.quant.scales} does not go with weights={file}, which has scales "
            f"of its own; leave it out"
        )
    return scales


def require_own(file: Path, key: str) -> None:
    """Refuses to write a pair of files over others; ``file`` is that of the weights.

    ConfigError: one of the two is there and `hires quantize` has not written them together.
    """
    beside = file.with_suffix(SUFFIX)
    there = next((one for one in (file, beside) if os.path.lexists(one)), None)
    if there is None:
        return
    try:
        if find_weights(str(file)).digest() == read_scales(beside).weights:
            return
    except ConfigError:
        pass
    raise ConfigError(
        f"{key} would overwrite {there}, which `hires quantize` has not written; name another "
        f"file, or remove it"
    )


def require_pair(place: WeightsPlace, scales: Scales, types: Mapping[str, str]) -> None:
    """Refuses the file of a quantised network whose scales, or types of tensors, are not its own.

    ``types`` are those of the network, by name; ConfigError names what differs.
    """
    held, again = place.metadata().get(MARK), "make both again with `hires quantize`"
    if held is None:
        raise ConfigError(f"{place.key} does not say which scales belong to it; {again}")
    if held != scales.mark:
        raise ConfigError(
            f"{place.key}: the scales beside it are not those that it was written with (their "
            f"digest is {scales.mark}, and {held[:16]!r} in its header); copy both, or {again}"
        )
    wrong = []
    for name, dtype in place.dtypes().items():
        asked = types.get(name, dtype)
        # Layers that stayed in float are converted, as those of any file of weights.
        if dtype != asked and not {dtype, asked} <= FLOATS:
            wrong.append(f"{name} is {dtype} there and {asked} here")
    if wrong:
        raise ConfigError(f"{place.key} has tensors of other types: {first_of(wrong)}; {again}")


def linear_way(config: RunConfig, scales: Scales) -> str:
    """Returns the scales of linear layers' inputs: those of a run's file, or ``quant.linear``."""
    return scales.linear if scales.weights else config.quant.linear


def calibration_key(config: RunConfig, digests: Mapping[str, str]) -> str:
    """Returns 16 digits that differ where scales may: network, weights, images, observer.

    The layout and the batch change no more than their last bits. ``digests`` are those of the
    run's inputs (``RunInputs.digests``).
    """
    values = identity(plain(config))
    kept = {key: values.get(key) for key in ("model", "data", "image", "seed", "precision")}
    # Ranges are the same whatever is kept by name, and what quant.auto chooses is not.
    every = (values.get("quant") or {}).items()
    quant = {key: one for key, one in every if key != "keep" or config.quant.auto is not None}
    kept |= {"quant": quant, "fuse": config.engine.fuse}
    of = {name: digests.get(name) for name in ("network", "data", "weights")}
    return hashlib.sha256(json.dumps([kept, of], sort_keys=True).encode()).hexdigest()[:16]


def _holds_numbers(file: Path) -> bool:
    # Whether it is there, whole, and has weights of 8 bits.
    try:
        return any(name.endswith(_WEIGHT_END) for name in find_weights(str(file)).shapes())
    except ConfigError:
        return False


def _checked(held: Any) -> Scales:
    if _object(held, "it")["version"] != VERSION:
        raise ValueError(f"version {str(held['version'])[:20]!r}, this hires reads {VERSION}")
    for name in _OBJECTS:
        _object(held[name], name)
    values = {_text(name): _affine(name, one) for name, one in held["values"].items()}
    ranges = {_text(name): _range(name, one) for name, one in held["ranges"].items()}
    if values.keys() != ranges.keys():
        raise ValueError("values and ranges have different names")
    images = held["images"]
    if type(images) is not int or images < 1:
        raise ValueError(f"images are {str(images)[:20]}")
    kept = {_text(name): _text(why) for name, why in held["kept"].items()}
    noise = {_text(name): _finite(one) for name, one in held["noise"].items()}
    texts = (_text(held[name]) for name in ("network", "source", "observer", "weights"))
    network, source, observer, weights = texts
    linear = held["linear"]
    if linear not in LINEAR:
        raise ValueError(f"linear layers of {str(linear)[:20]!r} scales, not {' or '.join(LINEAR)}")
    auto = {name: _finite(one) for name, one in held["auto"].items() if name in AUTO}
    if auto and not {"asked_db", "images"} <= auto.keys():
        raise ValueError("auto lacks what was asked for")
    measured = (held[name].items() for name in ("alone", "min_max_noise"))
    alone, min_max = ({_text(name): _finite(one) for name, one in some} for some in measured)
    rest = kept, noise, weights, source, linear, auto, alone, min_max
    return Scales(network, observer, images, values, ranges, *rest)


def _object(held: Any, what: str) -> dict[str, Any]:
    if not isinstance(held, dict):
        raise ValueError(f"{what} is {_kind(held)}, not an object of names")
    return held


def _kind(held: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(held), "a number" if isinstance(held, (int, float)) else "an object")


def _pair(name: str, held: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(held, list) or len(held) != 2:
        raise ValueError(f"{what} of {name[:40]} is {_kind(held)}, not a list of two numbers")
    return held[0], held[1]


def _affine(name: str, held: Any) -> Affine:
    scale, zero_point = _pair(name, held, "the scale")
    # Normal numbers of float32, in which kernels multiply.
    if type(scale) is not float or not 2.0**-126 <= scale < 2.0**127:
        raise ValueError(f"the scale of {name} is {str(scale)[:20]}")
    if type(zero_point) is not int or not 0 <= zero_point <= LAST:
        raise ValueError(f"the zero point of {name} is {str(zero_point)[:20]}")
    return Affine(scale, zero_point)


def _range(name: str, held: Any) -> tuple[float, float]:
    low, high = (_finite(end) for end in _pair(name, held, "the range"))
    if low > high:
        raise ValueError(f"the range of {name} is {low} to {high}")
    return low, high


def _finite(held: Any) -> float:
    if type(held) not in (int, float) or not math.isfinite(held):
        raise ValueError(f"a number is {str(held)[:20]}")
    return float(held)


def _text(held: Any) -> str:
    if type(held) is not str or len(held) > 4096 or not held.isprintable():
        raise ValueError(f"{str(held)[:40]!r} is no name")
    return held
