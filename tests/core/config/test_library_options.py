"""Options of libraries: one name, the variables of each library, and nothing else passes."""

from __future__ import annotations

import re

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.library_options import LIBRARIES, OPTIONS, libraries, variables
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.errors import ConfigError
from hires.core.store.naming import run_name

MPI_OPT = {"cuda_ipc": True, "registration_cache": True}


def test_each_library_gets_its_own_variables():
    assert variables(MPI_OPT, ["mvapich"]) == {
        "MV2_CUDA_IPC": "1",
        "MVP_CUDA_IPC": "1",
        "MV2_USE_LAZY_MEM_UNREGISTER": "1",
        "MVP_USE_LAZY_MEM_UNREGISTER": "1",
    }
    off = variables({"cuda_ipc": False}, ["openmpi", "nccl"])
    assert off == {
        "UCX_TLS": "^cuda_ipc",
        "OMPI_MCA_btl_smcuda_use_cuda_ipc": "0",
        "NCCL_P2P_DISABLE": "1",
    }
    # What a library does by itself is not set: UCX would lose all transports but the named one.
    assert variables({"cuda_ipc": True}, ["openmpi"]) == {"OMPI_MCA_btl_smcuda_use_cuda_ipc": "1"}


def test_libraries_are_those_that_carry_messages():
    assert libraries(["gloo"], "openmpi") == ()
    assert libraries(["mpi"], "mpich") == ("mpich",)
    # Which MPI srun starts is found in the job.
    assert libraries(["nccl", "mpi"], "srun") == LIBRARIES


def test_backends_that_a_table_mixes_count():
    comm = CommConfig(backend="gloo", backends=["mpi"], options={"cuda_ipc": False})
    config = RunConfig(comm=comm, launcher=LauncherConfig(name="mpirun", mpi="mvapich"))
    assert config.libraries == ("mvapich",)
    assert config.library_variables == {"MV2_CUDA_IPC": "0", "MVP_CUDA_IPC": "0"}


def test_sizes_are_bytes_and_a_config_comes_back_as_it_was():
    comm = CommConfig(backend="nccl", options={"nccl_buffer": "8MiB", "nccl_channels": 4})
    config = RunConfig(comm=comm)
    assert config.library_variables == {
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "4",
    }
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cuda_ip": True}, "comm.options.cuda_ip is unknown; did you mean cuda_ipc"),
        ({"cuda_ipc": "yes"}, "comm.options.cuda_ipc='yes' must be true or false"),
        ({"eager_limit": "much"}, "comm.options.eager_limit='much' must be a size, as 64KiB"),
        ({"eager_limit": 0}, "comm.options.eager_limit=0 must be a size"),
        ({"eager_limit": float("nan")}, "comm.options.eager_limit=nan must be a size"),
        ({"nccl_channels": True}, "comm.options.nccl_channels=True must be a whole number"),
        ({"nccl_algorithm": "Ring\nTree"}, "must be text on one line"),
    ],
)
def test_what_is_no_option_or_value_is_refused(options, text):
    with pytest.raises(ConfigError) as caught:
        CommConfig(options=options)
    assert text in str(caught.value)


def test_options_are_part_of_a_runs_name_and_none_leave_it_as_it_was():
    plain = RunConfig(comm=CommConfig(backend="mpi"))
    without = to_dict(plain)
    del without["comm"]["options"]
    assert run_name(from_dict(without)) == run_name(plain)
    assert run_name(RunConfig(comm=CommConfig(backend="mpi", options=MPI_OPT))) != run_name(plain)


def test_every_option_has_a_library_a_source_and_variables_that_a_shell_takes():
    for name, option in OPTIONS.items():
        words = [word for library in LIBRARIES for word in getattr(option, library).split()]
        assert words, name
        assert option.meaning.endswith(".")
        assert option.source
        for word in words:
            assert re.fullmatch(r"[A-Z][A-Za-z0-9_]*(=[^|\s]*\|[^|\s]*)?", word), word
            assert ("=" in word) == (option.kind == "switch"), word
