"""Chooses the device and the backend of a run, and compares its job's GPUs with those it uses.

Nothing here imports torch: both are chosen before a run is frozen, also for another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hires.core.config import comm_config
from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import machine
from hires.core.ranks.machine import TENSORRT
from hires.core.trackers import TRACKERS
from hires.plan.plan import Finding
from hires.plan.routes import ONE_MACHINE, STREAMED

CPU, CUDA = "cpu", "cuda"
GLOO, NCCL, MPI = "gloo", "nccl", "mpi"

_GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=](?!\d+(?:$|\())[\w.-]+)?(?:[:=](\d+))?(?:\(.*)?")
"""An entry of ``gres``: ``gpu``, ``gpu:4``, ``gpu:a100:4``, ``gres/gpu=4``."""


def device_of(config: RunConfig) -> str:
    """Returns ``device``, or what ``auto`` means: ``cuda`` where the ranks have GPUs, else ``cpu``.

    Ranks have GPUs if ``cluster.gpus`` or the job's options say so; on this machine alone, if it
    shows some and the installed torch is built for CUDA.
    """
    if config.device != "auto":
        return config.device
    if config.cluster.gpus is None and requested_gpus(config) is None:
        torch = machine.installed_torch()
        if torch is None or torch.cuda is None or not machine.device_files():
            return CPU
    return CUDA if gpus_of_node(config) else CPU


def backend_of(config: RunConfig) -> str:
    """Returns ``comm.backend``, or for ``auto`` nccl if every rank has a GPU alone, else gloo."""
    if config.comm.backend != "auto":
        return config.comm.backend
    own = device_of(config) == CUDA and ranks_of_node(config) <= (gpus_of_node(config) or 0)
    return NCCL if own else GLOO


def ranks_of_node(config: RunConfig) -> int:
    """Returns the most ranks that run on one machine."""
    return max(spread(config.parallel.num_processes, config.num_nodes))


def gpus_of_node(config: RunConfig) -> int | None:
    """Returns how many GPUs the ranks of one machine share; None if unknown."""
    if config.is_here:
        return len(machine.visible_gpus(config.cluster.gpus))
    if not config.launcher.has_jobs:  # on hosts, among which this one may have none
        own = len(machine.visible_gpus()) or None
        return own if config.cluster.gpus is None else config.cluster.gpus
    asked = requested_gpus(config)
    counts = [count for count in (config.cluster.gpus, asked) if count is not None]
    return min(counts, default=None)


def requested_gpus(config: RunConfig) -> int | None:
    """Returns the GPUs of a node that ``cluster.options`` request; None: they request none."""
    options, ranks = config.cluster.options, ranks_of_node(config)
    if not config.launcher.has_jobs:
        return None
    counts = []  # several options name the same GPUs
    for key in ("gres", "tres-per-node"):
        entries = (_GPU.fullmatch(entry.strip()) for entry in str(options.get(key, "")).split(","))
        named = [int(match[1] or 1) for match in entries if match]
        counts += [sum(named)] if named else []
    times = {"gpus-per-node": 1, "gpus-per-task": ranks}
    counts += [_total(options[key]) * each for key, each in times.items() if key in options]
    if "gpus" in options:
        counts.append(_total(options["gpus"]) // config.num_nodes)
    return max(counts, default=None)


def require_gpus(config: RunConfig) -> None:
    """Refuses to start ranks here on GPUs that the machine or its torch lacks; RunError: which."""
    if config.device != CUDA:
        return
    torch = machine.installed_torch()
    if not machine.device_files():
        missing = "this machine shows no NVIDIA GPU"
    elif torch is not None and torch.cuda is None:
        missing = f"torch {torch.version} is built for CPUs"
    else:
        return
    raise RunError(
        f"device=cuda, but {missing}; use device=cpu, or start it where GPUs are (launcher=slurm); "
        f"`hires doctor` shows what this machine has"
    )


def require_compilers(config: RunConfig) -> None:
    """Refuses to start ranks here that lack a compiler they need; RunError: which one."""
    mode = config.engine.compile
    lacks = machine.missing_compiler(config.device, mode) if mode != "off" else None
    if lacks is not None:
        raise RunError(f"engine.compile={mode}: {lacks}, or use engine.compile=off")


def check_hardware(config: RunConfig) -> Iterator[Finding]:
    """Yields how the device, the backend and the GPUs of a run's job do not fit together."""
    device, backend = device_of(config), backend_of(config)
    mode, is_here = config.engine.compile, config.is_here and not config.launcher.mpi_options
    if mode == TENSORRT and device != CUDA:
        text = (
            f"engine.compile={TENSORRT} builds engines for NVIDIA GPUs, and this run computes on "
            f"device={device}; use device=cuda, or engine.compile=off"
        )
        yield Finding("error", "engine.compile", text)
    # What ranks on this machine lack; one without GPUs prepares runs for another that has some.
    for name in config.measure.track if is_here else ():
        if lacks := TRACKERS[name].lacks():
            yield Finding("error", "measure.track", lacks)
    on_host = device == CPU and mode != TENSORRT
    if is_here and mode != "off" and (on_host or (device == CUDA and machine.device_files())):
        lacks = machine.missing_compiler(device, mode)
        if lacks is not None:
            yield Finding("error", "engine.compile", f"{lacks}, or use engine.compile=off")
    there, ranks = gpus_of_node(config), ranks_of_node(config)
    if device == CUDA:
        yield from _unmet(config, there, ranks)
    why = mpi_lacks(config)
    if why is not None and config.comm.uses(MPI):
        text = f"comm.backend=mpi needs ranks that an MPI starts, and {why}, or comm.backend=gloo"
        yield Finding("error", "comm.backend", text)
    if backend in ONE_MACHINE and config.num_nodes > 1:
        text = (
            f"comm.backend={backend} reaches the ranks of one machine only, and the ranks are on "
            f"{config.num_nodes} nodes; use comm.backend=gloo or mpi, or one node"
        )
        yield Finding("error", "comm.backend", text)
    there_are = comm_config.libraries((backend, *config.comm.backends), config.mpi)
    for name, value in config.comm.options.items():
        if not comm_config.variables({name: value}, there_are):
            text = (
                f"comm.options.{name} has no effect with comm.backend={backend}; it is of "
                f"{comm_config.OPTIONS[name].settings}: leave it out, or use one of these"
            )
            yield Finding("warning", "comm.options", text)
    if backend in STREAMED and device != CUDA:
        text = (
            f"comm.backend={backend} carries tensors of GPUs only, and device={device} has none; "
            f"use comm.backend=gloo"
        )
        yield Finding("error", "comm.backend", text)
    elif backend in STREAMED and there and ranks > there:
        text = (
            f"NCCL refuses several ranks on one GPU, and {ranks} ranks of a node share {there}; "
            f"use comm.backend=gloo, or at most {there} ranks on a node"
        )
        yield Finding("error", "comm.backend", text)


def mpi_lacks(config: RunConfig) -> str | None:
    """Returns why no MPI starts the ranks, and what would change that; None: one does."""
    launcher = config.launcher
    if launcher.name in ("local", "torchrun"):
        return f"launcher={launcher.name} starts them itself; use launcher=mpirun"
    if (config.mpi, config.srun_mpi) == ("srun", "none"):
        return (
            "srun --mpi=none starts them without one; set launcher.srun_mpi=pmix (see `srun "
            "--mpi=list`), or launcher.mpi=openmpi"
        )
    return None


def _unmet(config: RunConfig, there: int | None, ranks: int) -> Iterator[Finding]:
    # GPUs that a run on them lacks.
    launcher = config.launcher
    if there == 0:
        where = "cluster.gpus=0" if config.cluster.gpus == 0 else "this machine shows none"
        text = f"device=cuda needs GPUs, and {where}; use device=cpu, or a machine with GPUs"
        yield Finding("error", "device", text)
    elif there is None:
        jobs = " and cluster.options.gres, as cluster.gpus=4 +cluster.options.gres=gpu:4"
        text = (
            f"device=cuda, but nothing says how many GPUs a node has; set cluster.gpus"
            f"{jobs if launcher.has_jobs else ', as cluster.gpus=4'}"
        )
        yield Finding("warning", "cluster.gpus", text)
    elif launcher.has_jobs and requested_gpus(config) is None:
        # A job that has the whole node is given its GPUs, but its steps are not.
        text = (
            f"the job requests no GPUs, so Slurm gives its ranks none; add "
            f"+cluster.options.gres=gpu:{there}"
        )
        yield Finding("warning", "cluster.options", text)
    torch = machine.installed_torch()
    if launcher.has_jobs and config.cluster.container is None and torch and torch.cuda is None:
        text = (
            "the job would compute on GPUs with the torch that is installed here, a build for CPUs "
            "alone; install one that is built for CUDA, or name an image, cluster.container"
        )
        yield Finding("warning", "device", text)
    if there and ranks > there and backend_of(config) not in STREAMED:
        text = (
            f"{ranks} ranks of a node share {there} GPU{'s' if there > 1 else ''}: they compute in "
            f"turn, and their messages go through the host's memory ({backend_of(config)})"
        )
        yield Finding("warning", "cluster.gpus", text)


def _total(value: object) -> int:
    """Returns how many GPUs an option names, by type or without.

    >>> _total("a100:2,v100:1"), _total(4), _total(None)
    (3, 4, 0)
    """
    counts = [re.search(r"(\d+)$", entry) for entry in str(value or "").split(",")]
    return sum(int(match[1]) for match in counts if match)
