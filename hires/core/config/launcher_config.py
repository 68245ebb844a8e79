"""Declares ``launcher.*`` and ``cluster.*``: what starts the ranks, and where.

What differs between the programs that start many processes is data: another one is an entry of
:data:`DIALECTS`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hires.core.config.fields import Section, value
from hires.core.config.precision_config import PRECISIONS
from hires.core.errors import ConfigError
from hires.core.units import parse_size


@dataclass(frozen=True)
class Dialect:
    """What differs between programs that start many processes; several words stand in one text.

    ``{ranks}`` is the size of the world and ``{mpi}`` is ``launcher.srun_mpi``.
    """

    programs: str
    """Names under which the program goes, the most specific first."""
    words: str
    """What follows the program always. Ranks are bound by themselves, so nothing else may."""
    numbering: str
    """Variables of each process that hold its rank, the size of the world, and both on its node;
    ``|`` stands between the names of several versions."""
    hosts: str = ""
    """What names the hosts: ``{slots}`` stands for ``a:2,b:1``, ``{list}`` for ``a,a,b``, and
    ``{each}`` for the words ``a a b``; empty: it starts processes on this machine only."""
    forward: str = ""
    """What passes on one variable of the environment; empty: all of it goes along."""
    in_slurm: str = ""
    """Options inside a Slurm job that make it start through ``srun``."""
    as_root: Mapping[str, str] | None = None
    """Variables without which it refuses to run as root."""
    outer: str = ""
    """Beginnings of its variables about its own processes, which would mislead those of a rank."""
    label: str = ""
    """Its MPI's own name; empty: it is none."""
    version: str = ""
    """Pattern of the text by which its MPI names itself."""
    libraries: tuple[str, ...] = ()
    """Files that its MPI's library may be, in the order of preference."""
    node: str | None = None
    """Where the last of ``numbering`` holds the counts of all nodes, as ``2(x3),1``: which node
    this is."""


_FOUR = "{0}_RANK {0}_SIZE {0}_LOCAL_RANK {0}_LOCAL_SIZE"
DIALECTS = {
    "openmpi": Dialect(
        programs="mpirun.openmpi mpirun",
        words="-np {ranks} --bind-to none",
        numbering=_FOUR.format("OMPI_COMM_WORLD"),
        hosts="--host {slots}",
        forward="-x",
        outer="OMPI_COMM_WORLD_ OMPI_UNIVERSE_ PMIX_",
        label="Open MPI",
        version=r"open ?mpi|open-?rte|prte",
        libraries=("libmpi.so.40",),
        as_root={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    "mvapich": Dialect(
        programs="mpirun_rsh",
        words="-export -np {ranks}",
        # Of MVAPICH2, and of MVAPICH 3.
        numbering=f"{_FOUR.format('MV2_COMM_WORLD')}|{_FOUR.format('MVP_COMM_WORLD')}",
        outer="MV2_COMM_ MVP_COMM_",
        label="MVAPICH",
        version=r"mvapich",
        libraries=("libmpi.so.12",),
        hosts="{each} MV2_ENABLE_AFFINITY=0 MVP_ENABLE_AFFINITY=0",
    ),
    "mpich": Dialect(
        programs="mpiexec.hydra mpirun.mpich mpirun",
        words="-n {ranks} -bind-to none -genvall",
        numbering="PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
        hosts="-hosts {slots}",
        outer="PMI_",
        label="MPICH",
        version=r"mpich|hydra",
        libraries=("libmpi.so.12", "libmpich.so.12"),
        in_slurm="-bootstrap slurm",
    ),
    "srun": Dialect(
        programs="srun",
        words="--mpi={mpi} --ntasks={ranks} --overlap --export=ALL --cpu-bind=none --input=none "
        "--kill-on-bad-exit=1",
        numbering="SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        hosts="--distribution=arbitrary --nodelist={list}",
    ),
    "torchrun": Dialect(
        programs="torchrun",
        words="--standalone --nproc-per-node={ranks} --max-restarts=0 --no-python",
        numbering="RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
        outer="TORCHELASTIC_",
    ),
}
"""``launcher.mpi``, or ``torchrun`` -> its dialect; MVAPICH names itself MPICH too: it is first."""
MPIS = tuple(name for name in DIALECTS if name != "torchrun")
"""What may start the ranks of several nodes."""

HERE = "workstation"
"""Name of the cluster where none is configured: this machine."""
MANAGED_OPTIONS = {
    "nodes": "launcher.nodes",
    "ntasks": "parallel",
    "ntasks-per-node": "parallel and launcher.nodes",
    "cpus-per-task": "launcher.threads",
    "time": "launcher.minutes",
    "partition": "cluster.partition or launcher.partition",
    "account": "cluster.account or launcher.account",
    "qos": "launcher.qos",
    "signal": "launcher.signal_s",
    "requeue": "launcher.requeues",
    "job-name": "campaign",
    "output": "no key: the log is job.log of the run folder",
    "error": "no key: the log is job.log of the run folder",
    "open-mode": "no key: the log is job.log of the run folder",
    "array": "no key: a sweep makes the arrays",
    "wrap": "no key: the script is job.sbatch of the run folder",
    "export": "cluster.environment",
    "chdir": "the folder in which hires is called",
}
"""Options of sbatch that hires writes itself -> what decides them."""
FORBIDDEN_OPTIONS = {
    "test-only": "sbatch would submit nothing; `hires plan` shows when the job would start",
    "wait": "sbatch would return after the job only; `hires run --wait` waits and shows the steps",
    "parsable": "hires itself sets the format of sbatch's answer",
    "no-requeue": "a job that was preempted would not be started again; see launcher.requeues",
}
"""Options with which hires could not submit, or not look after a job -> why, and what would do."""


_NAME_OF_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY)$", re.I)
_SECRET = re.compile(r"\$\{oc\.env:\s*(?P<name>\w+)\s*(,\s*(?P<default>[^{}]*))?\}")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s]+@")
"""Of a URL, as ``http://USER:PASSWORD@HOST``."""


def is_secret(text: Any) -> bool:
    """Whether a value of ``cluster.environment`` reads variables; it is stored as it is written."""
    return isinstance(text, str) and _SECRET.search(text) is not None


def _holds_secret(name: str, text: Any) -> bool:
    """Whether a variable's text has a password, not only the name of the variable that has it."""
    read = [(m["name"], (m["default"] or "").strip(" '\"")) for m in _SECRET.finditer(str(text))]
    defaults = [default for _, default in read]
    if any(map(_PASSWORD.search, [_SECRET.sub("", str(text)), *defaults])):
        return True
    if _NAME_OF_SECRET.search(name):
        return not read or any(defaults)
    return any(default and _NAME_OF_SECRET.search(of) for of, default in read)


@dataclass
class ClusterConfig(
    Section,
    key="cluster",
    choices={"workstation": "This machine, or a cluster of which nothing is said"},
):
    """``cluster=NAME``: a site."""

    name: str = value(HERE, line=True)
    """What the site is called; ``workstation`` is this machine."""
    gpus: int | None = value(None, 0, 1024, identity=False)
    """GPUs of a node, which its ranks take in turn; unset: those that the job requests, or that
    this machine shows."""
    gpu_memory: Any = value(size=True, identity=False)
    """Memory of one GPU, with its unit, as 40GiB: a layout that needs more on one is refused.
    Unset: unknown."""
    gpu_capability: float | None = value(None, 3, identity=False)
    """Compute capability of these GPUs, as 8.0 of an A100 and 9.0 of an H100: it decides how much
    memory cuBLAS keeps. Unset: before 9.0."""
    cores: int | None = value(None, 1, identity=False)
    """Cores of a node; a job that needs more is refused. Unset: Slurm checks it."""
    memory: Any = value(size=True, identity=False)
    """Memory of a node for jobs, with its unit, as 240GiB: a layout that needs more on one node is
    refused. Unset: unknown, except for this machine."""
    tflop_per_s: dict[str, float] = value({}, identity=False)
    """What the convolutions of one GPU (or core) reach, in 10^12 operations a second, by precision,
    as ``{fp32: 28.4, bf16: 37.5}``: with the next keys it predicts step times on machines that are
    not this one. Another precision takes the speed of fp32."""
    memory_gb_per_s: float | None = value(None, above=0, identity=False)
    """10^9 bytes a second that such a GPU (or core) reads from its memory."""
    link_gb_per_s: float | None = value(None, above=0, identity=False)
    """10^9 bytes a second between two ranks of a node."""
    network_gb_per_s: float | None = value(None, above=0, identity=False)
    """10^9 bytes a second out of a node, and into one."""
    latency_us: float | None = value(None, above=0, identity=False)
    """Microseconds of a small message between nodes; unset: 20."""
    partition: str | None = value(line=True, identity=False)
    """Partition of its jobs, unless ``launcher.partition`` is set."""
    account: str | None = value(line=True, identity=False)
    """Account that is charged, unless ``launcher.account`` is set."""
    modules: list[str] = value([], line=True, identity=False)
    """Environment modules that a job loads first."""
    setup: list[str] = value([], line=True, identity=False)
    """Lines of bash that a job runs then, as ``[source /opt/site/env.sh, ulimit -l unlimited]``: an
    environment of conda, variables. One that fails ends the run. The Python of the ranks stays the
    one that planned the run."""
    container: str | None = value(line=True, identity=False)
    """Image in which the ranks of a job run, as ``/images/torch.sif``, with a Python that has the
    same hires. The folders of the runs and of the command are mounted."""
    container_by: str = value("apptainer", choices=("apptainer", "pyxis"), identity=False)
    """What starts the container: ``apptainer``, or ``pyxis``, the plug-in of srun."""
    container_mounts: list[str] = value([], line=True, identity=False)
    """Further folders that it mounts, as ``[/data:/data]``."""
    container_options: list[str] = value([], line=True, identity=False)
    """Further words for ``apptainer exec``, as ``[--nv]``, or for srun of ``pyxis``."""
    container_python: str = value("python3", line=True, identity=False)
    """Python inside the image."""
    mpi: str | None = value(None, choices=MPIS, identity=False)
    """What starts the ranks, unless ``launcher.mpi`` is set: ``srun``, ``openmpi``, ``mpich`` or
    ``mvapich``."""
    srun_mpi: str | None = value(line=True, identity=False)
    """TYPE of ``srun --mpi=TYPE``, as ``pmix``, unless ``launcher.srun_mpi`` is set."""
    interface: str | None = value(line=True, identity=False)
    """Network interface between the nodes, unless ``launcher.interface`` is set."""
    environment: dict[str, Any] = value({})
    """Variables of every rank, as settings of its network; those that are set already stay. A
    secret is named, as ``${oc.env:TOKEN}``, and stored so: ranks get it where they start. The text
    of a ``..TOKEN``, ``..KEY``, ``..PASSWORD``, and a password in a URL, is refused."""
    options: dict[str, Any] = value({})
    """Further options of sbatch without their dashes, as ``{gres: "gpu:4", exclusive: true}``."""

    @property
    def variables(self) -> dict[str, str]:
        """The ``environment`` with the values that it gets here; ConfigError: one is not set."""

        def found(match: re.Match[str]) -> str:
            text = os.environ.get(match["name"], match["default"])
            if text is None:
                raise ConfigError(
                    f"cluster.environment reads {match['name']}, which is not set here; set it, or "
                    f"give another value as ${{oc.env:{match['name']},VALUE}}"
                )
            return text

        return {name: _SECRET.sub(found, text) for name, text in self.environment.items()}

    def _problems(self) -> Iterator[str]:
        for name, rate in self.tflop_per_s.items():
            if name not in PRECISIONS or isinstance(rate, bool) or not _is_rate(rate):
                yield (
                    f"cluster.tflop_per_s has {name}: {rate!r}; give a number above 0 for one of "
                    f"{', '.join(PRECISIONS)}"
                )
        for name, text in self.environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
                yield f"cluster.environment has {name!r}, which is no name of a variable"
            elif isinstance(text, (dict, list)) or text is None or "\0" in str(text):
                yield f"cluster.environment.{name}={text!r} must be text or a number"
            elif text and _holds_secret(str(name), text):
                yield (  # without the value
                    f"cluster.environment.{name} would be stored as it stands, in records and "
                    f"pages, too: set the variable before the start, and name it here as "
                    f"'${{oc.env:{name}}}'"
                )
        for name, setting in self.options.items():
            yield from _wrong_option(str(name), setting)
        self.environment = {str(name): str(text) for name, text in self.environment.items()}

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a node; None if it is not configured."""
        return parse_size(self.memory)


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, (int, float)) and 0 < rate < math.inf


def spread(num_ranks: int, num_nodes: int) -> list[int]:
    """Returns how many ranks each node has; the first ones have one more if need be.

    >>> spread(5, 2)
    [3, 2]
    """
    least, more = divmod(num_ranks, num_nodes)
    return [least + (node < more) for node in range(num_nodes) if least or node < more]


def node_starts(num_ranks: int, num_nodes: int) -> tuple[int, ...]:
    """Returns the first rank of each node but the first one.

    >>> node_starts(10, 3)
    (4, 7)
    """
    return tuple(itertools.accumulate(spread(num_ranks, num_nodes)[:-1]))


def _wrong_option(name: str, setting: Any) -> Iterator[str]:
    key = f"cluster.options.{name}"
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name):
        yield (
            f"cluster.options has {name!r}: write an option of sbatch in small letters and "
            f"dashes, without the leading dashes, as gpus-per-node"
        )
    elif name in MANAGED_OPTIONS:
        yield f"{key} is written by hires; it follows from {MANAGED_OPTIONS[name]}"
    elif name in FORBIDDEN_OPTIONS:
        yield f"{key} cannot be used: {FORBIDDEN_OPTIONS[name]}"
    elif isinstance(setting, (dict, list)) or setting is None or setting is False:
        yield f"{key}={setting!r} must be text, a number, or true for an option without a value"
    elif not str(setting).isprintable() or not str(setting):
        yield f"{key}={setting!r} must be text on one line"


YEAR_MINUTES = 365 * 24 * 60
"""Longest time limit of a job; Slurm takes larger numbers for something else, or for no limit."""


LAUNCHER_NAMES = {
    "local": "One process per rank on this machine",
    "mpirun": "All ranks are started by mpirun, here or on launcher.hosts",
    "torchrun": "All ranks are started by torchrun on this machine",
    "slurm": "One Slurm job, its ranks spread over launcher.nodes",
}


@dataclass
class LauncherConfig(Section, key="launcher", choices=LAUNCHER_NAMES):
    """``launcher=NAME``: what starts the ranks."""

    name: str = value("local", line=True)
    """``local``: one process per rank on this machine. ``mpirun``: one command of an MPI, here or
    on ``hosts``. ``torchrun``: torch's own, on this machine. ``slurm``: one job, whose ranks are
    spread evenly over ``nodes``, consecutive ranks together."""
    threads: int = value(1, 1)
    """Compute threads of every rank; a Slurm job requests as many cores per rank."""
    max_ranks: int = value(64, 1, identity=False)
    """Most processes on this machine; a larger world is refused."""
    bind: str = value("auto", choices=("auto", "none"))
    """``auto``: each rank is bound to an equal share of neighbouring cores, if they suffice for all
    threads and, on this machine, one more for reading and sending. ``none``: it is not bound."""
    mpi: str | None = value(None, choices=MPIS)
    """``mpirun``, ``slurm``: what starts the ranks: mpirun of ``openmpi``, mpiexec.hydra of
    ``mpich``, mpirun_rsh of ``mvapich``, or ``srun``. Unset: ``cluster.mpi``, else openmpi (slurm:
    srun)."""
    srun_mpi: str | None = value(line=True)
    """TYPE of ``srun --mpi=TYPE``, for an MPI inside the ranks; one srun starts all of them, unless
    it is ``none``. Unset: ``cluster.srun_mpi``, else none."""
    mpirun: str | None = value(line=True, identity=False)
    """``mpirun``, ``slurm``: the program, if it goes by another name or lies elsewhere."""
    mpi_options: list[str] = value([])
    """``mpirun``, ``slurm``: further words for it, as ``[--mca,btl_tcp_if_include,ib0]``."""
    hosts: list[str] = value([], identity=False, of=("mpirun",))
    """``mpirun``: machines over which the ranks are spread evenly, this one first. It reaches the
    others by ssh without a password, and all have the folder of the runs. Empty: only this one."""
    port: int = value(0, 0, 65535, identity=False, plan=False)
    """Rendezvous port; 0: a free one, or one that follows from the number of the Slurm job."""
    nodes: int = value(1, 1)
    """``slurm``: nodes of the job; ``mpirun`` with ``mpi=srun``: those of the job around it."""
    partition: str | None = value(line=True)
    """``slurm``: partition; unset: the cluster's default."""
    account: str | None = value(line=True, identity=False)
    """``slurm``: account that is charged; unset: the user's default."""
    qos: str | None = value(line=True, identity=False)
    """``slurm``: quality of service; unset: the cluster's default."""
    minutes: int = value(60, 1, YEAR_MINUTES, identity=False)
    """``slurm``: time limit of the job in minutes."""
    signal_s: int = value(120, 10, identity=False)
    """``slurm``: seconds before the time limit (or up to a minute earlier) at which SIGUSR2 makes
    the ranks save and stop. The job is then queued again, and the run's next attempt resumes from
    what was saved; so does that of a preempted job, if the preemption leaves time to save."""
    requeues: int = value(3, 0, identity=False)
    """``slurm``: how often a job that reached its time limit is queued again."""
    other_code: bool = value(False, identity=False)
    """``slurm``: whether a job may run with another version or commit of hires than planned it."""
    interface: str | None = value(line=True, identity=False)
    """Network interface between ranks of several nodes, as ``ib0``; unset: ``cluster.interface``,
    else the one that leads to another node."""

    def _problems(self) -> Iterator[str]:
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
                yield f"launcher.hosts has {host!r}, which is no name or address of a machine"
        if self.signal_s >= 60 * self.minutes > 0:
            yield (
                f"launcher.signal_s={self.signal_s} must be less than launcher.minutes="
                f"{self.minutes}, which are {60 * self.minutes} seconds"
            )

    @property
    def has_jobs(self) -> bool:
        """Whether a scheduler starts the ranks, in a job on ``nodes`` machines."""
        return self.name not in ("local", "mpirun", "torchrun")
