"""Reads, checks and writes the scales of a quantised network; pure Python, the front end plans so.

    FILE.json           {"version": 3, "network": digest, "source": digest, "observer": "entropy",
                         "images": 256, "values": {value: [scale, zero point]},
                         "ranges": {value: [low, high]},
                         "kept": {node: reason}, "noise": {value: dB},
                         "weights": digest of FILE.safetensors, "weight_type": "int8" or "int7",
                         "linear": "static" or "dynamic",
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hires.core.config.precision_config import DYNAMIC, INT7, INT8, LINEAR, STATIC
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import INFERENCE
from hires.core.errors import ConfigError
from hires.core.store.file_names import MIB, StrPath
from hires.core.store.files import write_atomically
from hires.core.store.naming import identity, plain
from hires.core.store.network_weights import FLOATS, SAFETENSORS, WeightsPlace, find_weights
from hires.core.store.reading import read_named
from hires.core.units import listed
from hires.quant.affine import LARGEST, LAST, Affine

VERSION = 3
SUFFIX = ".json"
_WEIGHT_END = ":weight8"
"""How the names of a quantised network's weights end (``hires.plan.passes.int8_arithmetic``)."""
_MOST_BYTES = 64 * MIB
MARK = "hires.scales"
"""Key of the safetensors file's metadata: :attr:`Scales.mark` of the scales beside it."""
AUTO = ("asked_db", "signal_db", "images", "operators")
"""Names of :attr:`Scales.auto`."""
_OF_NETWORK = ("keep", "linear", "weights")
"""Keys that the ranges of values do not depend on."""
_REMEDY = "make it again with `hires quantize`"


@dataclass(frozen=True)
class Scales:
    """What a calibration found."""

    network: str
    """Digest of the network that was calibrated (``hires.plan.passes.int8``)."""
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
    weight_type: str = INT8
    """Of the integers in that file (``quant.weights``)."""
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
        facts = {"version": VERSION, **asdict(self)}
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


def write_scales(path: StrPath, scales: Scales, option: str = "--out FILE") -> None:
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
    if file.suffix in SAFETENSORS and (beside := file.with_suffix(SUFFIX)).is_file():
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
    if config.precision.name != INT8:
        raise ConfigError(
            f"weights={file} holds a quantised network; use it with task={', '.join(INFERENCE)} "
            f"and precision={INT8}, and the file that it was made from for everything else"
        )
    wrong, has, again = "", "", "leave it out, or make another file with `hires quantize {}`"
    if config.quant.linear == DYNAMIC != scales.linear:
        wrong, has = f"quant.linear={DYNAMIC}", "holds linear layers with static scales"
    if config.quant.weights == INT7 != scales.weight_type:
        wrong, has = f"quant.weights={INT7}", f"holds weights of {scales.weight_type}"
    if config.quant.scales not in (None, str(beside)):
        wrong, has = f"quant.scales={config.quant.scales}", "has scales of its own"
        again = "leave it out"
    if wrong:
        has = f"does not go with weights={file}, which {has}"
        raise ConfigError(f"{wrong} {has}; {again.format(wrong)}")
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
        raise ConfigError(f"{place.key} has tensors of other types: {listed(wrong)}; {again}")


def calibration_key(config: RunConfig, digests: Mapping[str, str]) -> str:
    """Returns 16 digits that differ where scales may: network, weights, images, observer.

    The layout and the batch change no more than their last bits. ``digests`` are those of the
    run's inputs (``RunInputs.digests``).
    """
    values = identity(plain(config))
    kept = {key: values.get(key) for key in ("model", "data", "image", "seed", "precision")}
    # Ranges are the same whatever is kept by name, and what quant.auto chooses is not.
    chooses, every = config.quant.auto is not None, (values.get("quant") or {}).items()
    quant = {key: value for key, value in every if chooses or key not in _OF_NETWORK}
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
    # A file may be a stranger's: every number is looked at before anything is planned with it.
    if type(held) is not dict or held["version"] != VERSION:
        raise ValueError(f"it is of another version, this hires reads {VERSION}")
    facts = {one.name: held[one.name] for one in fields(Scales)}
    for name, check in _BY_NAME.items():
        facts[name] = {_text(key): check(one) for key, one in facts[name].items()}
    for name in ("network", "source", "observer", "weights"):
        _text(facts[name])
    if facts["values"].keys() != facts["ranges"].keys():
        raise ValueError("values and ranges have different names")
    if type(facts["images"]) is not int or facts["images"] < 1:
        raise ValueError(f"images are {str(facts['images'])[:20]}")
    if facts["linear"] not in LINEAR:
        raise ValueError(f"linear is {str(facts['linear'])[:20]!r}, not {' or '.join(LINEAR)}")
    if facts["weight_type"] not in LARGEST:
        raise ValueError(f"weight_type is {str(facts['weight_type'])[:20]!r}")
    if facts["auto"] and not {"asked_db", "images"} <= facts["auto"].keys() <= {*AUTO}:
        raise ValueError("auto has other names than those of quant.auto")
    return Scales(**facts)


def _affine(held: Any) -> Affine:
    scale, zero_point = held
    # Normal numbers of float32, in which kernels multiply.
    if type(scale) is not float or not 2.0**-126 <= scale < 2.0**127:
        raise ValueError(f"a scale is {str(scale)[:20]}")
    if type(zero_point) is not int or not 0 <= zero_point <= LAST:
        raise ValueError(f"a zero point is {str(zero_point)[:20]}")
    return Affine(scale, zero_point)


def _range(held: Any) -> tuple[float, float]:
    low, high = map(_finite, held)
    if low > high:
        raise ValueError(f"a range is {low} to {high}")
    return low, high


def _finite(held: Any) -> float:
    if type(held) not in (int, float) or not math.isfinite(held):
        raise ValueError(f"a number is {str(held)[:20]}")
    return float(held)


def _text(held: Any) -> str:
    if type(held) is not str or len(held) > 4096 or not held.isprintable():
        raise ValueError(f"{str(held)[:40]!r} is no name")
    return held


_BY_NAME: dict[str, Callable[[Any], Any]] = {
    "values": _affine, "ranges": _range, "kept": _text, "noise": _finite, "auto": _finite,
    "alone": _finite, "min_max_noise": _finite,
}  # fmt: skip
"""What the file holds by names of nodes and values."""
