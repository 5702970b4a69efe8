"""syncline train: train a model on many workers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from syncline import jobs
from syncline.cli import options
from syncline.errors import RunFolderError
from syncline.launcher.nodes import JOIN_TIMEOUT_S
from syncline.plan import Plan
from syncline.remote import shown
from syncline.report.terminal import prediction_text
from syncline.store import Run, resumable_run
from syncline.units import format_count, format_seconds
from syncline.voice import Show, Voice


def train(
    plan: Annotated[str | None, typer.Argument(help="A plan (TOML); with --resume, a run's folder or URL.")] = None,
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    method: Annotated[str | None, typer.Option(help="How gradients travel; see `syncline methods`.")] = None,
    workers: options.Workers = None,
    threads: options.Threads = None,
    global_batch: options.GlobalBatch = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set; default 1.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Optimiser settings: default, course, fast or large-batch.")
    ] = None,
    optimizer: options.OptimizerName = None,
    clip_norm: options.ClipNorm = None,
    precision: options.Precision = None,
    seed: options.Seed = None,
    compute: options.Compute = None,
    settings: options.Settings = None,
    eval_per_rank: Annotated[
        bool | None, typer.Option("--eval-per-rank", help="Also test with each rank's own batch-norm statistics.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Record three steps with torch's profiler; choose others with --set profile.steps."
        ),
    ] = False,
    run_dir: options.RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last run, or the one given.")] = False,
    max_restarts: options.MaxRestarts = None,
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
    print_plan: options.PrintPlan = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on many workers, with one method."""
    where = options.Where(
        hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout, port, token_file,
        options.engine_flags(engine, address, master),
    )  # fmt: skip
    flags = {
        "model": model, "data": data, "data_dir": data_dir, "method": method, "workers": where.workers(workers),
        "threads": threads, "global_batch": global_batch, "steps": steps, "epochs": epochs, "recipe": recipe,
        "optimizer.name": optimizer, "optimizer.clip_norm": clip_norm, "precision": precision,
        "seed": seed, "compute": compute, "eval_per_rank": eval_per_rank, "max_restarts": max_restarts,
        "hosts": where.num_hosts, "link": link, **options.parse_settings(settings),
    }  # fmt: skip
    show: Show = "progress" if as_json else "all"
    if resume:
        changed = {name: value for name, value in flags.items() if name != "hosts" and value is not None}
        if run_dir is not None or profile or changed or not where.adds_nothing:
            raise RunFolderError("--resume continues a run exactly as planned: give no other plan flags with it.")
        old = None if where.node_rank else resumable_run(plan)  # other nodes are told by node 0
        place = where.place(old.plan() if old is not None else Plan())
        run = jobs.resume(old.path if old is not None else None, place=place, show=show)
    else:
        given = jobs.make_plan(plan, flags)
        given = _with_profile(given) if profile else given
        place = where.place(given)
        if print_plan:
            print(jobs.resolved(given, place, Voice()).to_toml(), end="")
            return
        run = jobs.train(given, run_dir=run_dir, place=place, show=show)
    if place.owns_run:
        _show(run, as_json=as_json)


def _with_profile(plan: Plan) -> Plan:
    """Three steps after the warm-up, or the last one of a shorter run, unless the plan names others."""
    if plan.profile.steps:
        return plan
    first = plan.measure.warmup + 1
    last = plan.steps - 1 if plan.steps is not None else first + 2
    steps = range(min(first, last), min(first + 2, last) + 1)
    return plan.replace(profile={"steps": list(steps), "ranks": list(plan.profile.ranks)})


def _show(run: Run, *, as_json: bool) -> None:
    summary = run.summary
    if as_json:
        options.print_json({"run": shown(run.path), **summary})
        return
    step = summary["step"]
    if step:
        print(
            f"average step {format_seconds(step['mean_s'])} over {step['counted']} steps "
            f"(first {step['warmup']} discarded), median {format_seconds(step['median_s'])}, "
            f"spread {format_seconds(step['spread_s'])}; {_rate(summary)}"
        )
    if summary.get("predicted"):
        print(f"method {summary['method']}: {prediction_text(summary['predicted'])}")
    if summary["loading"] and summary["loading"]["samples"]:  # none, where a resumed run had nothing left to do
        print(_loading(summary["loading"]))
    for mark in summary["marks"]:
        print(mark)
    print(f"run folder {shown(run.path)}; next: syncline compare")


def _loading(loading: dict[str, Any]) -> str:
    """On rank 0; the rate is what its loaders reach together while they are at work."""
    count = loading["loaders"]
    where = f"{count} loader process{'es' if count > 1 else ''}" if count else "the worker itself"
    return f"rank 0 made {loading['samples']:,} samples in {where}, {format_count(loading['samples_per_s'])} a second"


def _rate(summary: dict[str, Any]) -> str:
    unit = next(unit for unit in ("tokens", "samples", "images") if f"{unit}_per_s" in summary)
    return f"{format_count(summary[f'{unit}_per_s'])} {unit}/s"
