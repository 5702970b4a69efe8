"""syncline probe: what the way between ranks can do."""

from __future__ import annotations

from typing import Annotated

import typer

from syncline import jobs
from syncline.cli import options
from syncline.launcher.nodes import JOIN_TIMEOUT_S
from syncline.report.terminal import probe_tables


def probe(
    workers: options.Workers = None,
    backend: Annotated[str, typer.Option(help="gloo, shared-memory, mpi; with commas between.")] = ",".join(
        jobs.PROBED
    ),
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

    Every result is checked. Latency and rate are fitted; `explain` holds what a run sent against that rate.
    """
    where = options.Where(hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout, port)
    num_workers = where.workers(workers)
    place = where.place(jobs.make_plan(None, {"workers": num_workers, "hosts": where.num_hosts, "link": link}))
    probed = jobs.probe(
        workers=num_workers, backends=options.names(backend),
        sizes=options.names(sizes) if sizes is not None else jobs.PROBED_BYTES, repeats=repeats, threads=threads,
        hosts=where.num_hosts, link=link, run_dir=run_dir, place=place, show="progress" if as_json else "all",
    )  # fmt: skip
    if not place.owns_run:
        return
    if as_json:
        options.print_json({"run": str(probed.run.path), **probed.summary})
        return
    count = probed.run.plan.workers
    probe_tables(probed.rows, workers=count)
    for mark in probed.summary["marks"]:
        print(mark)
    print(f"run folder {probed.run.path}; next: syncline compare --workers {count}")
