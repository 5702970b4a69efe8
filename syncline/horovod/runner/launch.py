"""horovodrun: its flags, and what Syncline makes of them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from syncline import horovod
from syncline.cli import told
from syncline.errors import UsageError
from syncline.horovod.runner import Settings, network_variables, start, timeout_variables
from syncline.horovod.runner.ranks import call_of

NO_EFFECT = {
    "--fusion-threshold-mb": 1, "--cycle-time-ms": 1, "--cache-capacity": 1,
    "--hierarchical-allreduce": 0, "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0, "--no-hierarchical-allgather": 0,
    "--autotune": 0, "--no-autotune": 0, "--autotune-log-file": 1, "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1, "--autotune-bayes-opt-max-samples": 1, "--autotune-gaussian-process-noise": 1,
    "--mpi-threads-disable": 0, "--no-mpi-threads-disable": 0, "--tcp": 0, "--binding-args": 1,
    "--num-nccl-streams": 1, "--thread-affinity": 1, "--blacklist-cooldown-range": 2, "--disable-cache": 0,
    "--ssh-port": 1, "--ssh-identity-file": 1, "--log-level": 1, "--log-with-timestamp": 0,
    "--log-without-timestamp": 0, "--log-hide-timestamp": 0, "--no-log-hide-timestamp": 0,
    "--prefix-output-with-timestamp": 0, "--no-timeline-mark-cycles": 0, "--stall-check": 0,
}  # fmt: skip
"""Flags that are accepted, with the number of their values."""
SHORT = {"--ssh-port": "-p", "--ssh-identity-file": "-i", "--prefix-output-with-timestamp": "-prefix-timestamp"}
VARIABLES = {
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
}
"""Flags that ranks read as variables."""
REFUSED = {
    "--jsrun": (0, "--jsrun is not supported. Start the script with jsrun or mpirun itself."),
    "--config-file": (1, "--config-file is not supported. Give its settings as flags."),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"horovodrun: {message}.", action="horovodrun --help lists the flags.")


def run_commandline(arguments: Sequence[str] | None = None) -> None:
    told(lambda: _run(parse_args(arguments)))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="horovodrun", description="Run a script on several ranks of this machine.", allow_abbrev=False
    )
    parser.add_argument("-v", "--version", action="version", version=horovod.__version__)
    parser.add_argument("-np", "--num-proc", type=int, help="number of ranks")
    parser.add_argument("-cb", "--check-build", action="store_true", help="what is there, and end")
    parser.add_argument("-H", "--hosts", help="localhost:4; other machines are refused")
    parser.add_argument("-hostfile", "--hostfile", help="a file of lines: localhost slots=4")
    parser.add_argument("--start-timeout", type=int, help="seconds that hvd.init() waits for other ranks")
    parser.add_argument("--network-interfaces", "--network-interface", help="what Gloo and NCCL use: eth0")
    parser.add_argument("--output-filename", help="folder for rank.0/stdout, rank.0/stderr and so on")
    parser.add_argument("--verbose", action="store_true", help="say what is started")
    parser.add_argument("--gloo", action="store_true", help="the default")
    parser.add_argument("--mpi", action="store_true", help="start the ranks with mpiexec")
    parser.add_argument("--mpi-args", default="", help="further arguments of mpiexec")
    parser.add_argument("--no-stall-check", action="store_true", help="do not warn of ranks that wait for long")
    parser.add_argument("--timeline-mark-cycles", action="store_true", help="mark steps in the timeline")
    for name, variable in VARIABLES.items():
        parser.add_argument(name, metavar="VALUE", help=f"sets {variable}")
    elastic = parser.add_argument_group("elastic", "with any of these, a rank that dies is replaced")
    elastic.add_argument("--min-np", "--min-num-proc", type=int, dest="min_num_proc", help="least number of ranks")
    elastic.add_argument("--max-np", "--max-num-proc", type=int, dest="max_num_proc", help="largest number of ranks")
    elastic.add_argument("--host-discovery-script", help="prints localhost:SLOTS, as often as it is asked")
    elastic.add_argument("--reset-limit", type=int, help="how often ranks may be replaced")
    elastic.add_argument("--slots-per-host", "--slots", type=int, dest="slots", help="if the script prints none")
    elastic.add_argument("--elastic-timeout", type=int, help="seconds that ranks wait for a replaced one")
    ignored = parser.add_argument_group("accepted, without effect")
    for name, values in NO_EFFECT.items():
        names = [SHORT[name], name] if name in SHORT else [name]
        ignored.add_argument(*names, nargs=values, action=_Ignore, help=argparse.SUPPRESS)
    for name, (values, _) in REFUSED.items():
        parser.add_argument(name, nargs=values, action=_Refuse, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py …")
    return parser.parse_args(arguments)


class _Ignore(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        print(f"syncline: {option_string} has no effect.", file=sys.stderr, flush=True)


class _Refuse(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        raise UsageError(REFUSED[option_string or ""][1])


def _run(given: argparse.Namespace) -> None:
    if given.check_build:
        print(check_build())
        return
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.num_proc is None:
        raise UsageError("horovodrun needs -np, the number of ranks.", action="For example: -np 4")
    if not command:
        raise UsageError("horovodrun needs a command.", action="For example: horovodrun -np 4 python train.py")
    variables = {
        variable: value
        for name, variable in VARIABLES.items()
        if (value := getattr(given, name.strip("-").replace("-", "_"))) is not None
    }
    variables |= {"HOROVOD_STALL_CHECK_DISABLE": "1"} if given.no_stall_check else {}
    variables |= {"HOROVOD_TIMELINE_MARK_CYCLES": "1"} if given.timeline_mark_cycles else {}
    settings = Settings(
        num_proc=given.num_proc, hosts=given.hosts, hostfile=given.hostfile,
        discovery_script=given.host_discovery_script, slots=given.slots, min_num_proc=given.min_num_proc,
        max_num_proc=given.max_num_proc, reset_limit=given.reset_limit, elastic_timeout=given.elastic_timeout,
        output_filename=given.output_filename,
        environment=network_variables(given.network_interfaces) | timeout_variables(given.start_timeout) | variables,
    )  # fmt: skip
    if given.verbose:
        kind = "mpiexec's" if given.mpi else "elastic" if settings.is_elastic else "Syncline's"
        print(f"syncline: {settings.num_proc} ranks, {kind}: {shlex.join(command)}", file=sys.stderr, flush=True)
    if given.mpi:
        _become_mpiexec(settings, command, given.mpi_args)
    start(call_of(command), settings, is_script=True)


def _become_mpiexec(settings: Settings, command: list[str], more: str) -> NoReturn:
    """Its ranks are no children of ours: nothing is left to do for this process."""
    if settings.is_elastic or settings.output_filename or settings.hosts or settings.hostfile:
        raise UsageError(
            "--mpi does not go with hosts, elastic flags or --output-filename.", action="Give them to mpirun itself."
        )
    from syncline.launcher.mpi import mpiexec_command

    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    words = [*mpiexec_command(settings.num_proc), *shlex.split(more), *command]
    os.execve(words[0], words, {**os.environ, **settings.environment})


def check_build() -> str:
    """What Horovod's own prints, answered for what is here."""
    from syncline.horovod.common import util

    def box(there: object) -> str:
        return "[X]" if there else "[ ]"

    return f"""Horovod v{horovod.__version__}:

Available Frameworks:
    {box(False)} TensorFlow
    {box(True)} PyTorch
    {box(False)} MXNet

Available Controllers:
    {box(util.mpi_built())} MPI
    {box(util.gloo_built())} Gloo

Available Tensor Operations:
    {box(util.nccl_built())} NCCL
    {box(util.ddl_built())} DDL
    {box(util.ccl_built())} CCL
    {box(util.mpi_built())} MPI
    {box(util.gloo_built())} Gloo"""


if __name__ == "__main__":
    run_commandline()
