"""syncline cluster: emulated hosts on this machine, and job files for real ones."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import RankFailed, UsageError
from syncline.launcher.emulation import EmulatedCluster, parse_links
from syncline.launcher.emulation.network import host_name

cluster = typer.Typer(
    help="Scripts on emulated hosts of this machine; job files for real clusters.", no_args_is_help=True
)


@cluster.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs: python my_script.py …")],
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")] = 2,
    link: Annotated[
        str, typer.Option(help="Rate of the links: one, or one for each host (1gbit,100mbit).")
    ] = "1gbit",
    workers_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    threads: options.Threads = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank's output, not only rank 0's.")
    ] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Where output that is not shown goes; else dropped.")] = None,
) -> None:
    """Run any torchrun-style script on emulated hosts.

    The command comes after `--`. Exit code: that of the rank that failed first.
    """
    from syncline.launcher.emulation.scripts import run_script
    from syncline.launcher.starting import raise_if_interrupted, signals_noted
    from syncline.machine import cores

    rates = parse_links(link, hosts)
    if command[0] in ("python", "python3"):  # the one that Syncline runs in, where the shell would find another
        command = [sys.executable, *command[1:]]
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]}.", action="Write it as: -- python my_script.py")
    if workers_per_host < 1:
        raise UsageError(f"{workers_per_host} workers per host cannot run.", action="Ask for at least one.")
    os.environ["OMP_NUM_THREADS"] = str(threads or max(1, cores() // (hosts * workers_per_host)))
    with ExitStack() as stack:
        signals = stack.enter_context(signals_noted())
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        folder.mkdir(parents=True, exist_ok=True)
        emulated = stack.enter_context(EmulatedCluster(hosts, rates))
        failure = run_script(
            emulated, command, workers_per_host=workers_per_host, log_dir=folder.resolve(),
            show_all=all_ranks, stop_requested=lambda: bool(signals),
        )  # fmt: skip
        raise_if_interrupted(signals)
    if failure is None:
        return
    if failure.output and not all_ranks:
        print(failure.output, file=sys.stderr)
    how = f"exit code {failure.exit_code}" if failure.exit_code >= 0 else f"signal {-failure.exit_code}"
    error = RankFailed(f"ended with {how} on {host_name(failure.host)}.", rank=failure.rank)
    error.exit_code = failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code
    raise error


@cluster.command()
def file(
    kind: Annotated[str, typer.Argument(help="slurm, kubernetes, kubeflow or skypilot.")],
    plan: Annotated[Path, typer.Option(help="The plan to train (TOML).")] = Path("plan.toml"),
    nodes: Annotated[int, typer.Option(help="Number of machines.")] = 2,
    workers_per_host: Annotated[
        int | None, typer.Option(help="Ranks per node; default: the plan's workers, spread over the nodes.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="Cores of each node; default one for each compute thread of its ranks.")
    ] = None,
    hours: Annotated[float, typer.Option(help="Time limit of the job.")] = 24.0,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "syncline",
    image: Annotated[
        str | None, typer.Option(help="Container image with Syncline; default syncline:VERSION. Not for slurm.")
    ] = None,
    volume: Annotated[
        str | None, typer.Option(help="Kubernetes claim for run folders, which all nodes can write to.")
    ] = None,
) -> None:
    """Print a job file that trains a plan on several machines.

    For example: syncline cluster file slurm --plan plan.toml --nodes 4 > job.sh
    """
    from syncline.launcher.job_files import Job, job_file

    job = Job(
        nodes=nodes, workers_per_host=workers_per_host, cpus=cpus, hours=hours, name=name, image=image, volume=volume
    )
    print(job_file(kind, plan, job), end="")
