"""syncline probe: what the way between ranks can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.cli.nodes import Where, kept, marks_beside, run_folder
from syncline.errors import PlanError
from syncline.launcher.nodes import JOIN_TIMEOUT_S, JoinedNode
from syncline.plan import Plan, load_plan
from syncline.report.tables import probe_tables
from syncline.units import parse_bytes

DEFAULT_BACKENDS = "gloo,shared-memory"
BACKENDS = ("gloo", "shared-memory", "mpi")
DEFAULT_SIZES = tuple(1000 * 4**power for power in range(8))
"""1 kB to 16.4 MB."""
MOST_BYTES = 1_000_000_000


def probe(
    workers: options.Workers = None,
    backend: Annotated[str, typer.Option(help="gloo, shared-memory, mpi; with commas between.")] = DEFAULT_BACKENDS,
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes, such as 1kB,64kB,1MB; default 1 kB to 16 MB.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Visits to each size; small messages repeat in each visit.")] = 7,
    threads: options.Threads = None,
    run_dir: options.RunDir = None,
    hosts: options.Hosts = None,
    workers_per_host: options.WorkersPerHost = None,
    link: options.Link = None,
    nodes: options.Nodes = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    join_timeout: options.JoinTimeout = JOIN_TIMEOUT_S,
    port: options.Port = 0,
    as_json: options.Json = False,
) -> None:
    """Time all-reduce, send and receive, broadcast, gather and scatter by message size.

    Every result is checked. Latency and rate are fitted and kept for later predictions.
    """
    where = Where(hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout)
    backends, chosen = _backends(backend), _sizes(sizes)
    if repeats < 1:
        raise PlanError(f"--repeats {repeats} measures nothing.", action="Take at least 1.")
    flags = {"workers": workers, "threads": threads, "data": "synthetic", "method": "all-reduce"}
    plan = load_plan(None, where.plan_flags(flags))
    workers = plan.workers
    if plan.hosts > 1:
        backends = _between_hosts(backends, backend)
    if workers < 2:
        raise PlanError("a probe needs somebody to talk to.", action="Take at least 2 workers.")
    if "mpi" in backends:
        from syncline.launcher.mpi import mpiexec_command

        mpiexec_command(workers)  # whether there is one is better known now than after the others were measured
    if plan.hosts > 1 and not where.is_node:
        from syncline.cli.emulated import on_emulated_hosts

        arguments = ["--workers", str(workers), "--backend", ",".join(backends), "--repeats", str(repeats)]
        arguments += ["--sizes", ",".join(f"{size}B" for size in chosen), "--threads", str(threads or 1)]
        arguments += ["--link", plan.link or "1gbit", *where.emulated_arguments(run_dir, as_json=as_json)]
        on_emulated_hosts("probe", plan, arguments, takes_plan=False)
        return
    with where.joined(plan, quiet=as_json) as here:
        run = run_folder(here, run_dir, None, kind="probe", plan=plan, label=f"{'+'.join(backends)}-{workers}")
        with kept(run, here):
            from syncline.measure.probe import summarise

            rows: list[dict[str, Any]] = []
            for group, on in _worlds(backends, plan):
                rows += _measure(group, chosen, repeats, on, run.logs, port, here, quiet=as_json)
            summary = {
                **summarise(rows, workers=workers, hosts=plan.hosts, link=plan.link),
                "marks": marks_beside(plan),
            }
            if here is None or here.is_first:
                run.write_summary(summary)
    if here is not None and not here.is_first:
        return
    if as_json:
        options.print_json({"run": str(run.path), **summary})
    else:
        probe_tables(rows, workers=workers)
        for mark in summary["marks"]:
            print(mark)
        print(f"run folder {run.path}; next: syncline compare --workers {workers}")


def _measure(
    backends: list[str],
    sizes: list[int],
    visits: int,
    plan: Plan,
    logs: Path,
    port: int,
    here: JoinedNode | None,
    *,
    quiet: bool,
) -> list[dict[str, Any]]:
    from syncline import worker

    rows: list[dict[str, Any]] = options.on_ranks(
        worker.probe, (plan, backends, sizes, visits, quiet), plan, logs, port, here=here
    )
    return rows


def _between_hosts(backends: list[str], asked: str) -> list[str]:
    """Shared memory and this machine's mpiexec reach no further than one host."""
    within = [name for name in backends if name != "gloo"]
    if within and asked != DEFAULT_BACKENDS:
        raise PlanError(f"backend {within[0]} stays on one host.", action="Take --backend gloo with several hosts.")
    return [name for name in backends if name == "gloo"]


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
