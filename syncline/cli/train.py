"""syncline train: train a model on many workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.cli.nodes import Where, is_emulated, kept, link_check, marks_beside, run_folder
from syncline.errors import Interrupted, RunFolderError
from syncline.launcher.nodes import JOIN_TIMEOUT_S, JoinedNode
from syncline.plan import Plan, load_plan
from syncline.store import RunFolder, resumable_run
from syncline.units import format_seconds


def train(
    plan: Annotated[Path | None, typer.Argument(help="A plan (TOML); with --resume, a run folder.")] = None,
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    method: Annotated[str | None, typer.Option(help="How gradients travel; see `syncline methods`.")] = None,
    workers: options.Workers = None,
    threads: options.Threads = None,
    global_batch: options.GlobalBatch = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set; default 1.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Optimiser settings: course, fast or large-batch.")] = None,
    seed: options.Seed = None,
    compute: options.Compute = None,
    settings: options.Settings = None,
    eval_per_rank: Annotated[
        bool | None, typer.Option("--eval-per-rank", help="Also test with each rank's own batch-norm statistics.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Record three steps with torch's profiler; others: --set profile.steps.")
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
    join_timeout: options.JoinTimeout = JOIN_TIMEOUT_S,
    port: options.Port = 0,
    print_plan: options.PrintPlan = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on many workers, with one method."""
    where = Where(hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout)
    flags = {
        "model": model, "data": data, "data_dir": str(data_dir) if data_dir else None, "method": method,
        "workers": workers, "threads": threads, "global_batch": global_batch, "steps": steps, "epochs": epochs,
        "recipe": recipe, "seed": seed, "compute": compute, "eval_per_rank": eval_per_rank,
        "max_restarts": max_restarts, **options.parse_settings(settings),
    }  # fmt: skip
    changed = profile or not where.adds_nothing or any(flag is not None for flag in flags.values())
    if resume and (run_dir is not None or changed):
        raise RunFolderError("--resume continues a run as it was planned: give no other plan flags with it.")
    old = resumable_run(plan) if resume else None
    if old is not None and old.plan().replayed:
        raise RunFolderError(f"{old.path} is a replayed run: it keeps no checkpoints.", action="Start a new run.")
    given = old.plan() if old else load_plan(plan, where.plan_flags(flags))
    given = _with_profile(given) if profile else given
    emulated = given.hosts > 1 and not where.is_node
    quiet = as_json or print_plan or resume or emulated
    chosen = options.resolved(given, quiet=quiet, on_node=where.is_node)
    if print_plan:
        print(chosen.to_toml(), end="")
        return
    if emulated:
        from syncline.cli.emulated import on_emulated_hosts

        arguments = where.emulated_arguments(run_dir, as_json=as_json)
        on_emulated_hosts("train", chosen, arguments, resume=old.path if old else None)
        return
    with where.joined(chosen, quiet=as_json) as here:
        label = f"{chosen.method}-{chosen.workers}"
        run = run_folder(here, run_dir, old, kind="train", plan=chosen, label=label)
        summary = _run(run, chosen, here, resume=resume, port=port, quiet=as_json)
        if summary is not None:
            summary["marks"], summary["link"] = marks_beside(chosen), link_check()
            run.write_summary(summary)
    if summary is not None:
        _show(run, summary, as_json=as_json)


def _with_profile(plan: Plan) -> Plan:
    """Three steps after the warm-up, or the last one of a shorter run, unless the plan names others."""
    if plan.profile.steps:
        return plan
    first = plan.measure.warmup + 1
    last = plan.steps - 1 if plan.steps is not None else first + 2
    steps = range(min(first, last), min(first + 2, last) + 1)
    return plan.replace(profile={"steps": list(steps), "ranks": list(plan.profile.ranks)})


def _run(
    run: RunFolder, plan: Plan, here: JoinedNode | None, *, resume: bool, port: int, quiet: bool
) -> dict[str, Any] | None:
    if not quiet:
        threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
        note = f", compute {plan.compute_note}" if plan.replayed else ""
        print(f"{plan.model}, {plan.method}, {plan.workers} x {threads}{note}; run folder {run.path}")
    try:
        with kept(run, here, resumed=resume):
            from syncline import worker

            if resume and not quiet:
                print(f"continuing {_where(run)}")
            summary: dict[str, Any] | None = options.on_ranks(
                worker.train, (plan, run, resume, quiet), plan, run.logs, port,
                max_restarts=plan.max_restarts, here=here,
            )  # fmt: skip
    except (Interrupted, KeyboardInterrupt) as error:
        message = error.message if isinstance(error, Interrupted) else "Stopped by Ctrl-C."
        action = f"Continue {_where(run)} with: syncline train --resume {run.path}"
        if here is not None and not is_emulated():
            action += " on every node, with the same --nodes, --node-rank and --rendezvous"
        raise Interrupted(message, action=action) from None
    return summary


def _where(run: RunFolder) -> str:
    step = run.checkpoint_step()
    return "from the start (there is no checkpoint yet)" if step is None else f"after step {step}"


def _show(run: RunFolder, summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        options.print_json({"run": str(run.path), **summary})
        return
    step = summary["step"]
    if step:
        print(
            f"average step {format_seconds(step['mean_s'])} over {step['counted']} steps "
            f"(first {step['warmup']} discarded), median {format_seconds(step['median_s'])}, "
            f"spread {format_seconds(step['spread_s'])}; {_rate(summary)}"
        )
    if summary["loading"]:
        print(_loading(summary["loading"]))
    for mark in summary["marks"]:
        print(mark)
    print(f"run folder {run.path}; next: syncline compare")


def _loading(loading: dict[str, Any]) -> str:
    """On rank 0; the rate is what its loaders reach together while they are at work."""
    count = loading["loaders"]
    where = f"{count} loader process{'es' if count > 1 else ''}" if count else "the worker itself"
    return f"rank 0 made {loading['samples']:,} samples in {where}, {loading['samples_per_s']:,.0f} a second"


def _rate(summary: dict[str, Any]) -> str:
    unit = "tokens" if "tokens_per_s" in summary else "images"
    return f"{summary[f'{unit}_per_s']:.0f} {unit}/s"
