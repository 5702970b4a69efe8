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
from syncline.launcher.local import oversubscription, run_ranks, start_fork_server
from syncline.launcher.mpi import run_ranks_mpi
from syncline.plan import Plan
from syncline.store import RunFolder
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


def resolved(plan: Plan, *, quiet: bool) -> Plan:
    """The plan with data and threads filled in; says which data it is and whether cores are short."""
    from syncline.resolve import resolve

    if plan.method != "mpi":
        start_fork_server(PRELOAD)  # it loads torch while the data is checked
    plan, sentence = resolve(plan, ranks_per_host=plan.workers, progress=show_fetch)
    if not quiet:
        print(sentence)
    warning = oversubscription(plan.workers, plan.threads or 1)
    if warning and not plan.replayed:
        print(warning, file=sys.stderr)
    return plan


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


def on_ranks(function: Callable[..., Any], args: tuple[Any, ...], plan: Plan, log_dir: Path | None, port: int) -> Any:
    """Run a worker function on the plan's ranks; rank 0's result."""
    if plan.method == "mpi":
        return run_ranks_mpi(function, args, workers=plan.workers, log_dir=log_dir, threads=plan.threads)[0]
    results = run_ranks(
        function, args, workers=plan.workers, log_dir=log_dir, threads=plan.threads,
        preload=PRELOAD, port=port,
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
