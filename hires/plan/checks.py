"""Finds what is wrong with a layout whatever its messages: keys, numbers, parameters, the loss.

The findings are shown with those of the plan, so that a layout is corrected in one go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hires.core.augmentations import AUGMENTATIONS
from hires.core.config.data_config import OME_TIFF
from hires.core.config.fields import changed_keys
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import CPU_FLAGS, INT8
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import ONE_PASS
from hires.core.evaluation_summary import ROW_KINDS, num_classes
from hires.core.gradient_orders import is_beside
from hires.core.losses import CLASSES
from hires.core.schedules import SCHEDULES
from hires.core.store.provenance import cpu_flags
from hires.core.units import listed
from hires.plan.graph import Graph, describe
from hires.plan.hardware import CPU, CUDA, device_of
from hires.plan.partition import layer_starts, starts_between_ties, tied_uses
from hires.plan.plan import Finding, Stage
from hires.quant.affine import LARGEST

EMULATED = {
    "fp16": "fp16 is computed in fp32 and rounded, which takes longer than precision=fp32",
    "bf16": "bf16 saves memory, but is computed in fp32 and rounded, or by slow loops of torch",
    INT8: (
        "8-bit products would saturate, so fp32 convolutions of few channels at a time make the "
        "same bits, which takes longer than precision=fp32; quant.weights=int7 needs no such "
        "convolutions and loses little accuracy, which `hires quantize` shows"
    ),
}
"""Precision -> what a CPU without the instructions for it does."""
SHOWN = 8
_RESIDENT = "parallel.resident"
WEIGHTS = "weights"
"""Key of the finding that an evaluation or prediction has none."""


def check_numbers(config: RunConfig) -> Iterator[Finding]:
    """Yields what is wrong with a layout whatever the network."""
    parallel = config.parallel
    samples = config.batch // parallel.pieces
    if why := indivisible(config):
        yield Finding("error", "batch", why)
    elif samples % parallel.local_dp:
        fitting = max(d for d in range(1, parallel.local_dp) if samples % d == 0)
        batch = parallel.pieces * -(-samples // parallel.local_dp) * parallel.local_dp
        text = (
            f"parallel.local_dp={parallel.local_dp} does not divide a microbatch of {samples} "
            f"image{'s' if samples > 1 else ''}; use parallel.local_dp={fitting} or batch={batch}"
        )
        yield Finding("error", "parallel.local_dp", text)
    yield from check_tiles(config)
    yield from check_together(config)
    yield from check_residents(config)


def check_residents(config: RunConfig) -> Iterator[Finding]:
    """Yields why a layout's ranks cannot be several to a process."""
    parallel, resident = config.parallel, config.parallel.resident
    if resident == 1:
        return
    every, given = parallel.ranks_per_replica, f"parallel.resident={resident}"
    if config.task.name != "train":
        text = (
            f"{given} is for task=train: task={config.task.name} keeps nothing for a backward pass"
        )
        yield Finding("error", _RESIDENT, f"{text}; leave it out")
        return
    fitting = [n for n in range(2, every + 1) if every % n == 0 and _has_whole_stages(parallel, n)]
    use = f"use parallel.resident={' or '.join(map(str, [1, *fitting]))}"
    if every % resident:
        of = f"the {every} ranks of a replica" if parallel.replicas > 1 else f"{every} ranks"
        yield Finding("error", _RESIDENT, f"{given} does not divide {of}; {use}")
    elif not _has_whole_stages(parallel, resident):
        text = (
            f"{given} gives a process a part of a stage beside others, and a sum over the stage "
            f"would keep these from going on; {use}"
        )
        yield Finding("error", _RESIDENT, text)
    elif config.num_nodes > 1 and parallel.num_processes % config.num_nodes:
        text = f"{given} leaves {parallel.num_processes} processes for {config.num_nodes} machines"
        yield Finding("error", _RESIDENT, f"{text}; use a number of machines that divides them")
    order = config.comm.gradient_order
    refused = {
        f"device={device_of(config)} has one rank for each GPU": device_of(config) != CPU,
        "optimizer.shard=true divides the update among ranks": config.optimizer.shard,
        f"comm.gradient_order={order} begins sums before all ranks have their part": is_beside(
            order
        ),
        f"engine.compile={config.engine.compile} compiles for one": config.engine.compile != "off",
    }
    for reason in (text for text, holds in refused.items() if holds):
        text = f"{given} cannot run: {reason}; change that, or use {_RESIDENT}=1"
        yield Finding("error", _RESIDENT, text)


def _has_whole_stages(parallel: ParallelConfig, resident: int) -> bool:
    # Whether a process has ranks of one stage alone, or all ranks of each of its stages.
    ends = [0]
    for (rows, cols), shards in parallel.places:
        ends.append(ends[-1] + rows * cols * shards)
    if parallel.directions > 1:
        return resident == ends[-1]
    for first in range(0, ends[-1], resident):
        last = first + resident
        within = any(a <= first and last <= b for a, b in itertools.pairwise(ends))
        if not within and not (first in ends and last in ends):
            return False
    return True


def check_tiles(config: RunConfig) -> Iterator[Finding]:
    """Yields an error for each side of the image that is cut into more tiles than pixels."""
    tiles = config.parallel.tiles
    for dim, name, length in ((0, "rows", config.height), (1, "columns", config.width)):
        parts = max(grid[dim] for grid in config.parallel.grids)
        if parts > length:
            text = (
                f"parallel.tiles={tiles} cuts {length} {name} of the image into {parts} tiles; use "
                f"at most {length}, or a larger image"
            )
            yield Finding("error", "parallel.tiles", text)


def check_together(config: RunConfig) -> Iterator[Finding]:
    """Yields an error for every two keys of a layout that do not go together."""
    parallel = config.parallel
    directions = SCHEDULES[parallel.schedule].directions
    # Another number of stages than was given needs other layers per stage.
    freed = " with parallel.balance=null" if parallel.balance is not None else ""
    if parallel.directions > 1 and parallel.num_ranks == parallel.replicas:
        text = (
            f"parallel.directions=2 mirrors the stages over the ranks, but there is one rank; use "
            f"parallel.stages=2{freed}, or parallel=single"
        )
        yield Finding("error", "parallel.directions", text)
    if parallel.directions == 1 and parallel.pairs > 1:
        text = (
            f"parallel.pairs={parallel.pairs} needs parallel.directions=2 (parallel=gems); in one "
            f"direction use parallel.pairs=1 with more parallel.microbatches"
        )
        yield Finding("error", "parallel.pairs", text)
    if parallel.directions != directions:
        fit = [name for name in SCHEDULES if SCHEDULES[name].directions == parallel.directions]
        text = (
            f"parallel.schedule={parallel.schedule} is for {directions} direction"
            f"{'s' if directions > 1 else ''}; with parallel.directions={parallel.directions} use "
            f"parallel.schedule={' or '.join(fit)}"
        )
        yield Finding("error", "parallel.schedule", text)
    if parallel.local_dp > 1 and parallel.spatial_stages >= parallel.stages:
        text = (
            f"parallel.local_dp={parallel.local_dp} divides the stages behind the tiles, but all "
            f"{parallel.stages} are tiled; use parallel.stages={parallel.stages + 1}"
            f"{freed}, or parallel.local_dp=1"
        )
        yield Finding("error", "parallel.local_dp", text)


def indivisible(config: RunConfig) -> str | None:
    """Returns why a batch does not divide into its microbatches; None if it does."""
    parallel = config.parallel
    if config.batch % parallel.pieces == 0:
        return None
    keys = ("replicas", "directions", "pairs", "microbatches")
    counts = {key: getattr(parallel, key) for key in keys}
    factors = [f"parallel.{key}={count}" for key, count in counts.items() if count > 1]
    unit = parallel.pieces * parallel.local_dp
    below = config.batch // unit * unit
    remedy = f"batch={below} or batch={below + unit}" if below else f"batch={unit}"
    shards = (
        f", each of parallel.local_dp={parallel.local_dp} shards" if parallel.local_dp > 1 else ""
    )
    return (
        f"batch={config.batch} does not divide into {parallel.pieces} microbatches "
        f"({' times '.join(factors)}){shards}; use {remedy}, or fewer microbatches"
    )


def check_cuts(parallel: ParallelConfig, graph: Graph) -> Iterator[Finding]:
    """Yields errors if the network cannot be cut into the stages that are asked for."""
    layers = len(layer_starts(graph))
    if parallel.stages > layers:
        text = (
            f"parallel.stages={parallel.stages} is more than the {layers} layers of the network; "
            f"use parallel.stages={layers} or fewer"
        )
        yield Finding("error", "parallel.stages", text)
    if parallel.balance is not None and sum(parallel.balance) != layers:
        text = (
            f"parallel.balance={parallel.balance} sums to {sum(parallel.balance)}, but the network "
            f"has {layers} layers; make it sum to {layers}, or leave it out"
        )
        yield Finding("error", "parallel.balance", text)


def check_types(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields an error if the network learns complex numbers: no optimizer or sum here has them."""
    learned = (name for name, fact in graph.params.items() if fact.trainable)
    names = [name for name in learned if graph.params[name].dtype.startswith("complex")]
    if names and config.task.name == "train":
        text = (
            f"parameters hold complex numbers, which cannot be learned here: {listed(names, SHOWN)}"
            f"; store real pairs (..., 2) and use torch.view_as_complex in the forward pass"
        )
        yield Finding("error", "model", text)


def check_precision(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields an error or warning about arithmetic that the run's device does not have."""
    name, device = config.precision.name, config.device
    if name == "tf32" and device != CUDA:
        text = (
            f"precision=tf32 is arithmetic of NVIDIA GPUs from compute capability 8 on, and the "
            f"run has device={device}; use precision=fp32"
        )
        yield Finding("error", "precision", text)
    weights = {node.args["largest"] for node in graph.nodes if "largest" in node.args}
    needs = name != INT8 or LARGEST[INT8] in weights  # sums of 7-bit weights do not saturate
    if config.is_here and device == CPU and needs and lacks_instructions(name):
        text = f"this CPU has no {' or '.join(CPU_FLAGS[name])}: {EMULATED[name]}"
        yield Finding("warning", "precision", text)


def lacks_instructions(precision: str) -> bool:
    """Whether this CPU has no products of a precision; False where that is not shown."""
    flags = cpu_flags()
    return bool(flags) and precision in CPU_FLAGS and not flags & {*CPU_FLAGS[precision]}


def has_weights(config: RunConfig) -> bool:
    """Whether a run begins with numbers that another one, or a file, gives it."""
    return config.weights is not None or config.checkpoint.source is not None


def check_weights(config: RunConfig) -> Iterator[Finding]:
    """Yields a warning if an evaluation or prediction has no weights that were trained."""
    if config.task.name not in ONE_PASS or has_weights(config):
        return
    evaluates = config.task.name == "evaluate"
    means = "accuracy is that of guessing" if evaluates else "predictions are guesses"
    has = f"first weights from the seed, so its {means}"
    if config.model.name == "custom":
        has = "the numbers that the code of model.target gives it, and only trained ones mean much"
    text = (
        f"no weights=PATH: the network that {'is evaluated' if evaluates else 'predicts'} has {has}"
    )
    yield Finding("warning", WEIGHTS, text)


def check_colours(config: RunConfig) -> Iterator[Finding]:
    """Yields a note if a training changes colours, and its images have none."""
    channels, amounts = config.model.channels, changed_keys(config.augment)
    changed = [f"augment.{key}" for key, _ in amounts if AUGMENTATIONS[key].of_three]
    if channels != 3 and changed and config.augments:
        text = (
            f"no effect of {' and '.join(changed)} with model.channels={channels}: only images of "
            f"three channels have colours; augment.brightness and augment.contrast change any"
        )
        yield Finding("note", changed[0], text)


def check_prediction(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields an error if a prediction names a form of maps, and its network makes none."""
    form = config.predict.format
    shape = graph.shape(graph.output)
    if config.task.name == "predict" and form != OME_TIFF and len(shape) == 2:
        text = (
            f"predict.format={form} is the form of maps, and the network returns {shape}, classes "
            f"of images, which are in the table (predict.table); leave it out"
        )
        yield Finding("error", "predict.format", text)


def check_kept(graph: Graph) -> Iterator[Finding]:
    """Yields notes on what a quantised network computes in float."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in graph.kept.items():
        by_reason.setdefault(reason, []).append(name)
    start = "computed in fp32, not with 8-bit integers:"
    for why, names in by_reason.items():
        yield Finding("note", "precision", f"{start} {listed(names, SHOWN)} ({why})")


def check_output(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields an error if no loss can be computed from the network's output."""
    made, shape = graph.by_name[graph.output], graph.shape(graph.output)
    trains, classes = config.task.name == "train", config.model.classes
    wanted = [*shape[:1], config.model.channels, *(config.target_size or ())]
    key, text, problem = "model", "", ""
    factors = 1  # of each class, where the output has classes
    if len(shape) > 1:
        factors = shape[1] if config.objective.name == "bce" else num_classes(shape)
    if config.task.name == "infer":
        return
    if config.target_size is not None and shape != wanted:
        key = "model.scale"
        text = (
            f"the network returns {shape} where loss={config.objective.name} compares images of "
            f"{wanted} (n, channels, rows, columns), model.scale={config.model.scale} times the "
            f"size of the input; set model.scale, or use a network that makes such images, as "
            f"model=edsr, or loss=cross_entropy"
        )
    elif config.data.name == "masks" and shape[2:] != [config.height, config.width]:
        key = "data"
        text = (
            f"the network returns {shape} for images of {config.height}x{config.width}, and "
            f"data=masks has a class for each of their pixels; end it with an upsampling to their "
            f"size, or use model=unet"
        )
    elif len(shape) not in (2, 4) or shape[0] != graph.input_shape[0]:
        problem = f"the network returns {shape} for {graph.input_shape[0]} images"
    elif "float" not in (made.dtype or ""):
        problem = f"the network returns {describe(made)}"
    elif trains and not made.needs_grad:
        problem = f"no gradient flows from the network's output, {describe(made)}, to a parameter"
    elif config.objective.compares in ROW_KINDS and shape[1:] != [classes or shape[1]]:
        text = (
            f"the network returns {shape}, and data.targets={config.data.targets} are "
            f"{classes or 'so many'} for each image; make it return (n, {classes or 'numbers'})"
        )
    elif config.objective.compares == CLASSES and num_classes(shape) < (classes or 0):
        keys = f", or set data.classes={shape[1]} and model.classes={shape[1]}"
        problem = (
            f"the network returns {shape[1]} classes, the data has {classes}; make it return "
            f"{classes}{keys if config.data.path is None else ''}"
        )
    elif trains and (weights := config.loss.weights) and len(weights) != factors:
        key = "loss.weights"
        text = (
            f"loss.weights={weights} are {len(weights)} factors, and the network returns "
            f"{factors} classes; give one for each"
        )
    if problem:
        text = (
            f"{problem}; task={config.task.name} needs floating-point numbers of shape (n, "
            f"classes), or (n, classes, rows, columns) with the image's class for every pixel, or "
            f"images (loss=l1)"
        )
    if text:
        yield Finding("error", key, text)


def check_ties(graph: Graph, stages: list[Stage], training: bool) -> Iterator[Finding]:
    """Yields an error for every two stages apart in which training would change a parameter."""
    stage_of = {n.name: s.index for s in stages for n in graph.nodes[s.first : s.last]}
    tied: dict[tuple[int, int], list[str]] = {}
    users = tied_uses(graph, graph.nodes)
    users = {name: uses for name, uses in users.items() if training or name in graph.updates}
    for name, uses in users.items():
        first, last = (stage_of[node.name] for node in (uses[0], uses[-1]))
        if first != last:
            tied.setdefault((first, last), []).append(name)
    most = len(starts_between_ties(graph))
    for (first, last), names in tied.items():
        one, other = (describe(users[names[0]][index]) for index in (0, -1))
        text = (
            f"used by stages {first} ({one}) and {last} ({other}): {listed(names, SHOWN)}; use "
            f"parallel.stages={most}{' or fewer' if most > 1 else ''}, without parallel.balance"
        )
        yield Finding("error", "parallel.balance", text)
