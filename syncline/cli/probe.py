"""syncline probe: what the way between ranks can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.errors import PlanError
from syncline.plan import Plan, load_plan
from syncline.report.tables import probe_tables
from syncline.store import create_run
from syncline.units import parse_bytes

BACKENDS = ("gloo", "shared-memory", "mpi")
DEFAULT_SIZES = tuple(1000 * 4**power for power in range(8))
"""1 kB to 16.4 MB."""
MOST_BYTES = 1_000_000_000


def probe(
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    backend: Annotated[
        str, typer.Option(help="gloo, shared-memory, mpi; with commas between.")
    ] = "gloo,shared-memory",
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes, such as 1kB,64kB,1MB; default 1 kB to 16 MB.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Visits to each size; small messages repeat in each visit.")] = 7,
    threads: options.Threads = None,
    run_dir: options.RunDir = None,
    port: options.Port = 0,
    as_json: options.Json = False,
) -> None:
    """Time all-reduce, send and receive, broadcast, gather and scatter by message size.

    Every result is checked. Latency and rate are fitted and kept for later predictions.
    """
    backends, chosen = _backends(backend), _sizes(sizes)
    if repeats < 1:
        raise PlanError(f"--repeats {repeats} measures nothing.", action="Take at least 1.")
    plan = load_plan(None, {"workers": workers, "threads": threads, "data": "synthetic", "method": "all-reduce"})
    if workers < 2:
        raise PlanError("a probe needs somebody to talk to.", action="Take at least 2 workers.")
    if "mpi" in backends:
        from syncline.launcher.mpi import mpiexec_command

        mpiexec_command(workers)  # whether there is one is better known now than after the others were measured
    run = create_run(run_dir, kind="probe", plan=plan, label=f"{'+'.join(backends)}-{workers}")
    with options.running(run):
        from syncline.measure.probe import summarise

        rows: list[dict[str, Any]] = []
        for group, on in _worlds(backends, plan):
            rows += _measure(group, chosen, repeats, on, run.logs, port, quiet=as_json)
        summary = summarise(rows, workers=workers)
        run.write_summary(summary)
    if as_json:
        options.print_json({"run": str(run.path), **summary})
    else:
        probe_tables(rows, workers=workers)
        print(f"run folder {run.path}; next: syncline compare --workers {workers}")


def _measure(
    backends: list[str], sizes: list[int], visits: int, plan: Plan, logs: Path, port: int, *, quiet: bool
) -> list[dict[str, Any]]:
    from syncline import worker

    rows: list[dict[str, Any]] = options.on_ranks(
        worker.probe, (plan, backends, sizes, visits, quiet), plan, logs, port
    )
    return rows


def _worlds(backends: list[str], plan: Plan) -> list[tuple[list[str], Plan]]:
    """mpi has ranks of its own, which mpiexec starts; all others share one world."""
    others = [name for name in backends if name != "mpi"]
    worlds = [(others, plan)] if others else []
    return [*worlds, (["mpi"], plan.replace(method="mpi"))] if "mpi" in backends else worlds


def _backends(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        what = f"backend {unknown[0]!r} cannot be probed." if unknown else "no backend is named."
        raise PlanError(what, action=f"Take some of {', '.join(BACKENDS)}.")
    return names


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return list(DEFAULT_SIZES)
    sizes = sorted({parse_bytes(part) for part in text.split(",") if part.strip()})
    for size in sizes:
        if size % 4 or size > MOST_BYTES:
            raise PlanError(
                f"--sizes {size} is not a multiple of 4 up to 1 GB: messages are made of 4-byte numbers.",
                action="Write it as 64kB,1MB.",
            )
    if not sizes:
        raise PlanError("--sizes names no size.", action="Write it as 64kB,1MB.")
    return sizes
