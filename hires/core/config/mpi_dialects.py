"""Describes the programs that start many processes at once, as data: another is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
