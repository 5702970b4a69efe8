"""syncline compare: what each method costs, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline import jobs
from syncline.cli import options
from syncline.launcher.nodes import JOIN_TIMEOUT_S
from syncline.report.terminal import comparison_table
from syncline.results import Comparison


def compare(
    plan: Annotated[Path | None, typer.Argument(help="A plan (TOML) to start from.")] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas between.")] = ",".join(jobs.COMPARED),
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = None,
    threads: options.Threads = None,
    global_batch: options.GlobalBatch = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each method.")] = 10,
    warmup: Annotated[int, typer.Option(help="Steps of each method before the timed ones.")] = 2,
    seed: options.Seed = None,
    compute: options.Compute = None,
    settings: options.Settings = None,
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
    """Time the methods side by side.

    They take turns step by step on the same batches, in one world of ranks.
    """
    where = options.Where(hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout, port)
    names = options.names(methods)
    flags = {
        "model": model, "data": data, "data_dir": data_dir, "workers": where.workers(workers), "threads": threads,
        "global_batch": global_batch, "seed": seed, "compute": compute, "hosts": where.num_hosts, "link": link,
        "method": jobs.leading(jobs.method_names(names)), **options.parse_settings(settings),
    }  # fmt: skip
    given = jobs.make_plan(plan, flags)
    place = where.place(given)
    comparison = jobs.compare(
        given, methods=names, steps=steps, warmup=warmup, run_dir=run_dir, place=place,
        show="progress" if as_json else "all",
    )  # fmt: skip
    if not place.owns_run:
        return
    if as_json:
        options.print_json({"run": str(comparison.run.path), **comparison.summary})
    else:
        _show(comparison)


def _show(comparison: Comparison) -> None:
    plan, summary = comparison.run.plan, comparison.summary
    workload = f"{plan.model} on {plan.data}"
    if plan.replayed:
        workload = f"compute {plan.compute_note}"
    title = f"{workload}, global batch {plan.global_batch}, {plan.workers} workers"
    comparison_table(comparison.rows, title=title, steps=plan.steps or 0, warmup=plan.measure.warmup)
    for mark in summary["marks"]:
        print(mark)
    print(f"run folder {comparison.run.path}; next: syncline verify --workers {plan.workers}")
