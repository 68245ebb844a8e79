from hires.core.ranks.world import World, from_environment
from hires.launcher.ranks.places import rank_environment

WORLD = World(1, 2, 1, 2, "127.0.0.1", 29500, 0)


def test_rank_gets_its_world_and_threads():
    environ = rank_environment(
        {"PATH": "/bin", "OMP_NUM_THREADS": "64"}, WORLD, threads=3, interface="lo"
    )
    assert from_environment(environ) == WORLD
    assert environ["PATH"] == "/bin"
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"


def test_world_of_an_outer_launcher_is_not_inherited():
    """Under torchrun these tell torch that the agent hosts the meeting point: nobody would."""
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "9"}
    environ = rank_environment(outer, WORLD, threads=1, interface="lo")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    assert environ["RANK"] == "1"


def test_interface_chosen_by_the_user_stays():
    environ = rank_environment({"GLOO_SOCKET_IFNAME": "eth7"}, WORLD, threads=1, interface="lo")
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
