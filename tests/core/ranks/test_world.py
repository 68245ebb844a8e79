import pytest

from hires.core.errors import ConfigError
from hires.core.ranks.world import Numbers, World, from_environment, numbers

WORLD = World(1, 4, 1, 4, "127.0.0.1", 29500, 2)


def test_environment_and_back():
    environ = WORLD.to_environment()
    assert environ["RANK"] == "1"
    assert environ["WORLD_SIZE"] == "4"
    assert environ["HIRES_ATTEMPT"] == "2"
    assert from_environment(environ) == WORLD


@pytest.mark.parametrize("name", sorted(WORLD.to_environment()))
def test_missing_variable_is_named_with_the_remedy(name):
    environ = WORLD.to_environment()
    del environ[name]
    with pytest.raises(ConfigError, match=rf"{name} is not set: .*launch\.sh"):
        from_environment(environ)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "one", "RANK='one' must be a number"),
        ("RANK", "4", "RANK=4 must be 0 to WORLD_SIZE-1=3"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 do not fit"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 must be 1 to 65535"),
        ("HIRES_ATTEMPT", "-1", "HIRES_ATTEMPT=-1 must be 0 or more"),
    ],
)
def test_values_that_make_no_sense(name, value, text):
    with pytest.raises(ConfigError, match=text):
        from_environment({**WORLD.to_environment(), name: value})


@pytest.mark.parametrize(
    ("starter", "environ"),
    [
        ("torchrun", {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        (
            "openmpi",
            {
                "OMPI_COMM_WORLD_RANK": "4",
                "OMPI_COMM_WORLD_SIZE": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        (
            "mpich",
            {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ),
        (
            "mvapich",
            {
                "MV2_COMM_WORLD_RANK": "4",
                "MV2_COMM_WORLD_SIZE": "5",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        (
            "srun",
            {
                "SLURM_PROCID": "4",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "3,2",
                "SLURM_NODEID": "1",
            },
        ),
    ],
)
def test_every_starter_has_its_own_words_for_the_same_numbers(starter, environ):
    assert numbers(starter, environ) == Numbers(4, 5, 1, 2)
    for name in environ:
        left = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigError, match=name):
            numbers(starter, left)


def test_counts_that_slurm_folds_are_unfolded():
    environ = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}
    assert numbers("srun", environ).local_size == 1
    assert numbers("srun", environ | {"SLURM_NODEID": "2"}).local_size == 2
    with pytest.raises(ConfigError, match="has no node 4"):
        numbers("srun", environ | {"SLURM_NODEID": "4"})
