"""syncline compare, verify and probe: what each method costs, whether it is right, what links carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline import jobs
from syncline.accounting.doubts import compared
from syncline.cli import options
from syncline.launcher.nodes import JOIN_TIMEOUT_S
from syncline.launcher.places import Here
from syncline.remote import shown
from syncline.report.terminal import certificate_table, comparison_table, print_paragraph, probe_tables
from syncline.results import Comparison


def compare(
    plan: Annotated[Path | None, typer.Argument(help="A plan (TOML) to start from.")] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = ",".join(jobs.COMPARED),
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = None,
    threads: options.Threads = None,
    global_batch: options.GlobalBatch = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each method.")] = 10,
    warmup: Annotated[int, typer.Option(help="Warm-up steps of each method, not counted.")] = 2,
    optimizer: options.OptimizerName = None,
    clip_norm: options.ClipNorm = None,
    precision: options.Precision = None,
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
    token_file: options.TokenFile = None,
    join_timeout: options.JoinTimeout = JOIN_TIMEOUT_S,
    port: options.Port = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    master: options.Master = None,
    when_busy: options.WhenBusy = "go",
    as_json: options.Json = False,
) -> None:
    """Time the methods side by side.

    They take turns step by step on the same batches, in one world of ranks.
    """
    where = options.Where(
        hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout, port, token_file,
        options.engine_flags(engine, address, master),
    )  # fmt: skip
    names = options.names(methods)
    flags = {
        "model": model, "data": data, "data_dir": data_dir, "workers": where.workers(workers), "threads": threads,
        "global_batch": global_batch, "seed": seed, "compute": compute, "hosts": where.num_hosts, "link": link,
        "optimizer.name": optimizer, "optimizer.clip_norm": clip_norm, "precision": precision,
        "method": jobs.leading(jobs.method_names(names)), **options.parse_settings(settings),
    }  # fmt: skip
    given = jobs.make_plan(plan, flags)
    place = where.place(given)
    comparison = jobs.compare(
        given, methods=names, steps=steps, warmup=warmup, run_dir=run_dir, place=place,
        when_busy=when_busy, show="progress" if as_json else "all",
    )  # fmt: skip
    if not place.owns_run:
        return
    if as_json:
        said = compared(comparison.rows, comparison.summary["marks"])
        options.print_json({"run": shown(comparison.run.path), "verdict": said, **comparison.summary})
    else:
        _show(comparison)


def _show(comparison: Comparison) -> None:
    plan, summary = comparison.run.plan, comparison.summary
    workload = f"{plan.model} on {plan.data}"
    if plan.replayed:
        workload = f"compute {plan.compute_note}"
    workload += "" if plan.precision == "float32" else f", {plan.precision}"
    title = f"{workload}, global batch {plan.global_batch}, {plan.workers} workers"
    counts = {"steps": plan.steps or 0, "warmup": plan.measure.warmup, "block": plan.measure.block}
    comparison_table(comparison.rows, title=title, **counts)
    for mark in summary["marks"]:
        print(mark)
    if said := compared(comparison.rows, summary["marks"]):
        print_paragraph(said)
    print(f"run folder {shown(comparison.run.path)}; next: syncline verify --workers {plan.workers}")


def verify(
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2",
    methods: Annotated[str, typer.Option(help="Methods to certify, separated by commas.")] = ",".join(jobs.SENDING),
    models: Annotated[str, typer.Option(help="Models to certify them on, separated by commas.")] = "cnn,vgg11",
    transfer_dtype: Annotated[
        str | None, typer.Option(help="Certify 16-bit transfers (bf16 or fp16) of the methods that support them.")
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="Batch norm across ranks: local, broadcast or sync; default: the method's own.")
    ] = None,
    precision: options.Precision = None,
    threads: options.Threads = None,
    seed: options.Seed = None,
    hosts: options.Hosts = None,
    link: options.Link = None,
    port: options.Port = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    master: options.Master = None,
    as_json: options.Json = False,
) -> None:
    """Prove that each method computes what one worker would.

    Two references: the same shards run one after the other, and one worker on the whole batch.

    Exit code 1 if any certificate fails.
    """
    flags = options.engine_flags(engine, address, master)
    certificates = jobs.verify(
        workers=options.numbers(workers, "--workers"), methods=options.names(methods), models=options.names(models),
        transfer_dtype=transfer_dtype, batch_norm=batch_norm, precision=precision, threads=threads, seed=seed,
        hosts=hosts, link=link,
        place=flags.place() if flags else None if hosts else Here(port), show="progress" if as_json else "all",
    )  # fmt: skip
    if as_json:
        options.print_json({"passed": certificates.holds, "certificates": certificates.rows})
    else:
        certificate_table(certificates.rows)
        print("all certified; next: syncline compare" if certificates.holds else "NOT certified: see WRONG above")
    raise typer.Exit(0 if certificates.holds else 1)


def probe(
    workers: options.Workers = None,
    backend: Annotated[str, typer.Option(help="gloo, shared-memory or mpi; separate several by commas.")] = ",".join(
        jobs.PROBED
    ),
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes, such as 1kB,64kB,1MB; default 1 kB to 16 MB.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds over all sizes; small messages repeat within a round.")] = 7,
    threads: options.Threads = None,
    run_dir: options.RunDir = None,
    hosts: options.Hosts = None,
    workers_per_host: options.WorkersPerHost = None,
    link: options.Link = None,
    nodes: options.Nodes = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = None,
    join_timeout: options.JoinTimeout = JOIN_TIMEOUT_S,
    port: options.Port = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    master: options.Master = None,
    as_json: options.Json = False,
) -> None:
    """Time all-reduce, send and receive, broadcast, gather and scatter by message size.

    Every result is checked. Latency and rate are fitted; `explain` holds what a run sent against that rate.
    """
    where = options.Where(
        hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout, port, token_file,
        options.engine_flags(engine, address, master),
    )  # fmt: skip
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
        options.print_json({"run": shown(probed.run.path), **probed.summary})
        return
    count = probed.run.plan.workers
    probe_tables(probed.rows, workers=count)
    for mark in probed.summary["marks"]:
        print(mark)
    print(f"run folder {shown(probed.run.path)}; next: syncline compare --workers {count}")
