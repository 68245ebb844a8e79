"""``hires doctor``: check what this machine and its cluster have, and say what would help.

What might crash, as a torch, is checked in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from hires.cli.compose_config import compose
from hires.cli.data_keys import resolve_data
from hires.cli.options import JSON, Parser, composing, flag, number
from hires.cli.screen import print_config, print_json, print_lines, table_lines
from hires.cli.verbs.verb_bench import exec_benchmark
from hires.core import programs
from hires.core.config.launcher_config import DIALECTS
from hires.core.config.precision_config import CPU_FLAGS, INT8
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.programs import adding, code_command
from hires.core.ranks import heartbeat, machine, meeting, mpi_library
from hires.core.store.files import write_rate
from hires.core.store.provenance import collect, cpu_flags
from hires.core.units import gib, size
from hires.launcher.interface import FAILED, OK, WARNING, Check, all_launchers, launcher_of
from hires.plan.checks import EMULATED, lacks_instructions
from hires.plan.simulation.machine_calibration import (
    calibration_or_defaults,
    load_calibration,
)

PARSER = Parser(
    "doctor",
    (
        "hires doctor                             this machine",
        "hires doctor launcher=slurm launcher.nodes=2    this machine, and two nodes by a job",
        "hires doctor --calibrate                 measures operators and links, to predict steps",
        "hires doctor --calibrate model=unet image=256 batch=8    and the layers of this network",
        "hires doctor --json",
    ),
    *composing(),
    flag("--calibrate", "measure this machine for predicted step times, up to two minutes"),
    number("--timeout", "seconds that the job may wait and take", default=600),
    JSON,
)


def main(args: Namespace) -> int:
    """Prints one line a check, each with a remedy if it is not ok; returns 1 if one failed."""
    if args.calibrate:
        return calibrate(args)
    config = RunConfig()  # the defaults need no Hydra to be installed
    if args.overrides or args.config_dir:
        config = compose(args.overrides, args.config_dir)
    if args.cfg:
        return print_config(config, args.json)
    checks = all_checks(config, args.argv, args.timeout)
    ok = all(check.state != FAILED for check in checks)
    body = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
    if args.json:
        print_json(body)
    else:
        print_lines(lines(checks))
    return 0 if ok else RunError.exit_code


def calibrate(args: Namespace) -> int:
    """Becomes the measurement of this machine, and of the layers of a network if keys name one."""
    if args.config_dir or args.cfg:
        raise ConfigError("--calibrate measures this machine and takes no --config-dir or --cfg")
    config = to_dict(resolve_data(compose(args.overrides))) if args.overrides else None
    task = {"kind": "calibrate", "name": "calibrate", "command": shlex.join(args.argv)}
    return exec_benchmark({**task, "config": config, "timeout": 1200, "out": "", "json": args.json})


def all_checks(config: RunConfig, argv: Sequence[str], timeout_s: float) -> list[Check]:
    """Returns all checks; those of the nodes by a job, if the launcher has jobs."""
    checks = machine_checks(Path(config.results), config.launcher.nodes)
    checks += [*torch_checks(), guarded("calibration", calibration_check), *mpi_checks()]
    of_launchers = [check for one in all_launchers() for check in one.checks(config)]
    if all(check.state != FAILED for check in of_launchers):
        of_launchers += launcher_of(config).node_checks(config, argv, timeout_s)
    return [*checks, *of_launchers]


def calibration_check() -> Check:
    """Whether step times are predicted from what was measured here, and how old that is."""
    name = "calibration"
    try:
        calibration = load_calibration()
    except ConfigError as error:
        text, _, remedy = str(error).rpartition("; ")
        return Check(name, WARNING, text, remedy)
    if calibration is None:
        return Check(name, OK, f"none: steps are predicted with {calibration_or_defaults().source}")
    return Check(name, OK, f"{calibration.source}, {calibration.age}")


def lines(checks: Sequence[Check]) -> list[str]:
    """Returns a table of checks; below each that is not ok stands what would help."""
    rows: list[tuple[str, str, str, str]] = []
    for check in checks:
        rows.append((check.where, check.name, check.state, " ".join(check.text.split())))
        if check.remedy and check.state != OK:
            rows.append(("", "", "", f"-> {' '.join(check.remedy.split())}"))
    return table_lines(rows, "llll", heads=False, names=("where", "check", "state", "text"))


_ROOM_BYTES = 2**30
_MESSAGES_BYTES = 2**26  # of all messages within one machine, at most
_SLOW_BYTES_PER_S = 20e6
_SKEW_S = 5.0
_TORCH = """\
import json, torch
cuda, devices = torch.cuda, []
if cuda.is_available():
    devices = [cuda.get_device_name(i) for i in range(cuda.device_count())]
facts = {"version": torch.__version__, "threads": torch.get_num_threads(), "devices": devices}
facts["cuda"] = torch.version.cuda
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
facts["nccl"] = ".".join(map(str, cuda.nccl.version())) if nccl and devices else None
print(json.dumps(facts))
"""
_MPI = """\
import sys
from hires.core.ranks import mpi_library
mpi = mpi_library.load()
turns = mpi.Init_thread(mpi.THREAD_MULTIPLE) >= mpi.THREAD_SERIALIZED
name = mpi_library.first_line(mpi.Get_library_version())
mpi.Finalize()
print("loads", name)
sys.exit(None if turns else f"the threads of {name} cannot take turns: use another MPI")
"""


def ask(
    *command: str, most_s: float = 300.0, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Returns exit code and output of a program, of one that failed its errors.

    From a busy network file system a torch may take minutes to load.
    """
    try:
        done = programs.run(*command, most_s=most_s, environ=environ)
    except RunError as error:
        return -1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout


def last(text: str) -> str:
    """Returns the last line of an output, where programs say why they failed."""
    return (text.strip().splitlines() or ["no output"])[-1]


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """Returns the result of a check; one that raises has failed, and the others go on."""
    try:
        return check()
    except (OSError, ValueError, LookupError, ImportError, HiresError, SubprocessError) as error:
        why = f"the check itself failed: {type(error).__name__}: {error}"
        remedy = "fix the cause, install hires again, or report it as a bug"
        return Check(name, FAILED, why, remedy)


def machine_checks(results: Path, nodes: int) -> list[Check]:
    """Returns the lines about this machine that need no torch."""
    place = next(one for one in (results.absolute(), *results.absolute().parents) if one.is_dir())
    checks: dict[str, Callable[[], Check]] = {
        "python": lambda: Check("python", OK, f"{platform.python_version()} at {sys.executable}"),
        "packages": _packages,
        "machine": _machine,
        "precisions": _instructions,
        "results": lambda: _results(results, place),
        "clock": lambda: _clock(place),
        "shared memory": _shared_memory,
        "address": lambda: _address(nodes),
    }
    return [guarded(name, check) for name, check in checks.items()]


def torch_checks() -> list[Check]:
    """Returns the lines about torch; one line if it cannot be imported."""
    code, text = ask(*code_command(_TORCH))
    if code:
        return [Check("torch", FAILED, last(text), "pip install torch again, see constraints.txt")]
    facts = json.loads(last(text))
    lacks = machine.missing_compiler("cuda" if facts["devices"] else "cpu")
    what, _, remedy = (lacks or "all that engine.compile=stage needs is here").partition("; ")
    compiles = _good("compiler", lacks is None, what, f"engine.compile=stage needs it: {remedy}")
    version = f"{facts['version']}, {facts['threads']} threads in one process"
    return [Check("torch", OK, version), *gpu_checks(facts), compiles]


def mpi_checks() -> list[Check]:
    """Returns the lines about MPI; a machine without any is fine.

    A launcher and a library that do not pair are refused when ranks start.
    """
    where = shutil.which("mpirun")
    code, text = ask("mpirun", "--version", most_s=30)
    launcher = "" if code else text.strip().partition("\n")[0]
    mpirun = "not here; launcher=mpirun needs one, nothing else does"
    if where is not None:
        mpirun = f"{launcher or 'of an unknown kind'} at {where}"
    checks = [Check("mpirun", OK, mpirun), _mpi4py(launcher)]
    code, text = ask("srun", "--mpi=list", most_s=30)
    return checks if code else [*checks, Check("pmi", OK, f"srun offers {' '.join(text.split())}")]


def gpu_checks(facts: dict[str, Any]) -> list[Check]:
    """Returns the lines about GPUs, from what torch found."""
    devices, nccl = facts["devices"], facts["nccl"]
    if not devices:
        code, names = ask("nvidia-smi", "--list-gpus", most_s=30)
        count = machine.device_files() if code else len(names.splitlines())
        text = f"NVIDIA GPUs: {count}, CUDA of torch: {facts['cuda'] or 'none'}"
        remedy = "install a driver and a torch whose CUDA it runs, give the container or job its "
        remedy += f"GPUs, and check {machine.VISIBLE}; until then ranks compute on the CPU"
        return [_good("cuda", not count, text, remedy)]
    remedy = "install a torch with NCCL; until then GPUs talk over gloo"
    return [
        Check("cuda", OK, f"CUDA {facts['cuda']}: {len(devices)} x {devices[0]}"),
        _good("nccl", nccl is not None, nccl or "this torch has no NCCL", remedy),
    ]


def _good(name: str, is_good: bool, text: str, remedy: str) -> Check:
    return Check(name, OK, text) if is_good else Check(name, WARNING, text, remedy)


def _packages() -> Check:
    try:
        needs = [line for line in metadata.requires("hires") or () if ";" not in line]
    except metadata.PackageNotFoundError:  # a checkout: what is missing shows at its import
        text = "hires runs from a checkout, so what it needs is not checked"
        return Check("packages", WARNING, text, "pip install the checkout")
    wrong = []
    for line in needs:
        name, least = re.split(r"[^\w-]", line)[0], re.search(r"[>=]=([\d.]+)", line)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if least and _numbers(version) < _numbers(least[1]):
            wrong.append(f"{name} {version} is older than {least[1]}")
    if wrong:
        return Check("packages", FAILED, "; ".join(sorted(wrong)), "pip install hires again")
    return Check("packages", OK, f"all {len(needs)} are installed")


def _numbers(version: str) -> list[int]:
    """Returns the numbers of a version, as ``2.13.0+cpu``."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _machine() -> Check:
    facts = collect()["hardware"]
    memory = gib(facts["memory"]) if facts["memory"] else "memory unknown"
    text = f"{facts['cores']} cores, {memory}, {facts['cpu']}"
    remedy = "ranks share one core: layouts run, but gain no speed"
    return _good("machine", facts["cores"] > 1, text, remedy)


def _instructions() -> Check:
    """What the CPU multiplies itself; its speed only, as every precision runs on every CPU."""
    if not cpu_flags():
        return Check("precisions", OK, "this system does not show what its CPU multiplies")
    slow = [precision for precision in CPU_FLAGS if lacks_instructions(precision)]
    fast = [precision for precision in CPU_FLAGS if precision not in slow]
    text = f"this CPU has instructions for {' and '.join(fast) or 'fp32 only'}"
    text += f", none for {' and '.join(slow)}" if slow else ""
    remedy = "; ".join(f"no {', '.join(CPU_FLAGS[one])}: {EMULATED[one]}" for one in slow)
    # Hardly any CPU has fp16, and nothing is lost by that: bf16 is as small.
    return _good("precisions", not {*slow} & {"bf16", INT8}, text, remedy)


def _results(results: Path, place: Path) -> Check:
    free, remedy = shutil.disk_usage(place).free, "choose results=FOLDER, or free some space"
    text = f"{results.absolute()}, {gib(free)} free"
    try:
        rate = write_rate(place)
    except OSError as error:
        return Check("results", FAILED, f"{text}, not writable ({error.strerror})", remedy)
    text += f", takes {size(rate)}/s"
    if free >= _ROOM_BYTES:
        remedy = "checkpoints take long: save less often (checkpoint.every), or choose results="
    return _good("results", free >= _ROOM_BYTES and rate >= _SLOW_BYTES_PER_S, text, remedy)


def _shared_memory() -> Check:
    left, free = meeting.left_memory_files(), meeting.free_memory()
    text = f"{meeting.memory_folder()}, {size(free)} free"
    if left:
        text += f"; killed ranks left {len(left)} files there"
        return Check("shared memory", WARNING, text, "the next run on this machine removes them")
    remedy = "free some, enlarge it (of a container: --shm-size), or set comm.shared_memory=false"
    return _good("shared memory", free >= _MESSAGES_BYTES, text, remedy)


def _clock(place: Path) -> Check:
    ahead_s = heartbeat.clock_ahead_s(place)
    text = f"the file system of the results is {abs(ahead_s):.1f} s "
    text += "ahead of this machine" if ahead_s > 0 else "behind this machine"
    remedy = "set both clocks (chrony, ntpd); hires goes by the file system's own, so runs are fine"
    return _good("clock", abs(ahead_s) < _SKEW_S, text, remedy)


def _address(nodes: int) -> Check:
    """Where ranks meet: the address that this host's name leads to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"the name of this host, {name}, leads nowhere ({error.strerror})"
        if nodes == 1:
            return Check("address", OK, f"{text}; ranks on one machine meet at 127.0.0.1")
        return Check("address", FAILED, text, "add it to DNS or to /etc/hosts of all nodes")
    reached = nodes == 1 or not meeting.is_loopback(address)
    text = f"{name} is {address}" + ("" if reached else "; no other machine reaches that")
    remedy = "let the name lead to the network's address, or set launcher.interface=NAME"
    return _good("address", reached, text, remedy)


def _mpi4py(launcher: str) -> Check:
    """Which library mpi4py loads beside the mpirun that names itself so."""
    if util.find_spec("mpi4py") is None:
        what = f"not here; only comm.backend=mpi needs it; {adding('mpi')}"
        return Check("mpi4py", OK, what)
    kinds = [n for n, d in DIALECTS.items() if d.version and re.search(d.version, launcher, re.I)]
    found = mpi_library.variables(kinds[0] if kinds else "srun", "mpirun", os.environ)
    code, text = ask(*code_command(_MPI), environ={**os.environ, **found})
    if code and not launcher:
        return Check("mpi4py", OK, "it is here, and no MPI; only comm.backend=mpi needs one")
    remedy = "load the site's MPI (module load ...), then pip install --no-binary mpi4py mpi4py"
    return _good("mpi4py", not code, last(text), remedy)
