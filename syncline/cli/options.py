"""What the verbs share: plan flags, data progress, starting ranks with a run folder, JSON."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.errors import Interrupted, PlanError, UsageError
from syncline.launcher.here import run_ranks
from syncline.launcher.here.fork_server import start_fork_server
from syncline.launcher.mpi import run_ranks_mpi
from syncline.launcher.nodes import JoinedNode
from syncline.machine import oversubscription
from syncline.plan import Plan
from syncline.store import RunFolder, list_runs, open_run
from syncline.units import format_bytes

Model = Annotated[str | None, typer.Option(help="See `syncline models`, or your own as module:callable.")]
Data = Annotated[
    str | None,
    typer.Option(help="auto, cifar10, synthetic, synthetic-ages, imdb-wiki, folder or text."),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder that holds the data (or set SYNCLINE_DATA).")]
Workers = Annotated[int | None, typer.Option(help="Number of ranks.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads per worker; default cores / workers.")]
GlobalBatch = Annotated[int | None, typer.Option(help="Samples per step over all workers.")]
Seed = Annotated[int | None, typer.Option(help="Start of all randomness.")]
RunDir = Annotated[Path | None, typer.Option(help="Where the run is written; default runs/DATE-….")]
Port = Annotated[int, typer.Option(help="Port on which ranks meet; 0 takes a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Compute = Annotated[
    str | None,
    typer.Option(help="real; replay:RUN sleeps the compute times recorded there; sleep:FILE those stated in a file."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any plan key, as KEY=VALUE; e.g. optimizer.learning_rate=0.05.")
]
MaxRestarts = Annotated[
    int | None, typer.Option(help="Starts again from the last checkpoint after ranks failed; default 0.")
]
Hosts = Annotated[int | None, typer.Option(help="Emulated hosts on this machine, joined by links.")]
WorkersPerHost = Annotated[int | None, typer.Option(help="Ranks on each host or node; default 1.")]
Link = Annotated[
    str | None, typer.Option(help="Rate of the emulated hosts' links, e.g. 1gbit; one, or one for each host.")
]
Nodes = Annotated[int | None, typer.Option(help="Machines of the run, which is started on each of them.")]
NodeRank = Annotated[int | None, typer.Option(help="This machine's number, from 0; see --nodes.")]
Rendezvous = Annotated[str | None, typer.Option(help="Where machines meet: HOST:PORT of number 0; see --nodes.")]
JoinTimeout = Annotated[float, typer.Option(help="Seconds to wait for machines that have not joined.")]
PrintPlan = Annotated[bool, typer.Option("--print-plan", help="Print the resolved plan as TOML and stop.")]
PRELOAD = ["syncline.worker", "torch._dynamo"]
"""What ranks need, loaded once before they are forked; the first optimiser that torch makes needs the second."""


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """`optimizer.learning_rate=0.05` as a plan override; a value that is not TOML is taken as text."""
    parsed: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        if not equals:
            raise PlanError(f"--set {setting!r} has no '='.", action="Write it as --set KEY=VALUE.")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text.strip()
    return parsed


def resolved(plan: Plan, *, quiet: bool, on_node: bool = False) -> Plan:
    """The plan with data and threads filled in; says which data it is and whether cores are short.

    `on_node`: this machine is one of the plan's hosts; otherwise all of its ranks are here.
    """
    from syncline.resolve import resolve

    if plan.method_row.world != "mpiexec" and (on_node or plan.hosts == 1):
        start_fork_server(PRELOAD)  # it loads torch while the data is checked
    ranks_here = plan.workers // plan.hosts if on_node else plan.workers
    plan, sentence = resolve(plan, ranks_per_host=ranks_here, num_hosts=plan.hosts, progress=show_fetch)
    if not quiet:
        print(sentence)
    warning = oversubscription(ranks_here, plan.threads or 1)
    if warning and not plan.replayed:
        print(warning, file=sys.stderr)
    return plan


def run_with_steps(path: Path | None) -> RunFolder:
    """The run at a path, or the last one that takes steps: a probe has none."""
    runs = [run for run in list_runs() if run.info().get("kind") != "probe"] if path is None else []
    return runs[-1] if runs else open_run(path)


@contextmanager
def running(run: RunFolder, *, resumed: bool = False) -> Iterator[None]:
    """Whatever ends the ranks, the run folder says how it ended. What was refused leaves no trace."""
    before = run.info()["status"]
    try:
        with run.locked():
            if resumed:
                run.set_status("running")
            yield
    except UsageError:
        if resumed:
            run.set_status(before)
        else:
            run.discard()
        raise
    except BaseException as error:
        run.set_status("stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        raise
    run.set_status("finished")


def on_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    plan: Plan,
    log_dir: Path | None,
    port: int,
    *,
    max_restarts: int = 0,
    here: JoinedNode | None = None,
) -> Any:
    """Run a worker function on the plan's ranks, or on the share of this node; the first rank's result."""
    if here is not None:
        assert log_dir is not None
        return here.run_ranks(
            function, args, workers=plan.workers, log_dir=log_dir, threads=plan.threads or 1, preload=PRELOAD
        )[0]
    if plan.method_row.world == "mpiexec":
        return run_ranks_mpi(function, args, workers=plan.workers, log_dir=log_dir, threads=plan.threads)[0]
    results = run_ranks(
        function, args, workers=plan.num_ranks, log_dir=log_dir, threads=plan.threads,
        preload=PRELOAD, port=port, max_restarts=max_restarts,
    )  # fmt: skip
    return results[0]


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def show_fetch(what: str, done: int, total: int | None, unit: str = "bytes") -> None:
    """Progress on one line of the terminal. What is counted ends its line when all is done."""
    if sys.stderr.isatty():
        count = format_bytes if unit == "bytes" else "{:,}".format
        of = f" of {count(total)}" if total else ""
        end = "\n" if unit != "bytes" and done == total else ""
        print(f"\r{what}: {count(done)}{of}   ", end=end, file=sys.stderr, flush=True)
