"""syncline compare: what each method costs, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.cli.nodes import Where, kept, link_check, marks_beside, run_folder
from syncline.errors import PlanError
from syncline.launcher.nodes import JOIN_TIMEOUT_S
from syncline.methods import BASELINE, METHODS
from syncline.plan import Plan, load_plan
from syncline.report.tables import comparison_table

DEFAULT = [name for name, row in METHODS.items() if row.compared]


def compare(
    plan: Annotated[Path | None, typer.Argument(help="A plan (TOML) to start from.")] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas between.")] = ",".join(DEFAULT),
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
    where = Where(hosts, workers_per_host, link, nodes, node_rank, rendezvous, join_timeout)
    names = method_names(methods)
    flags = {
        "model": model, "data": data, "data_dir": str(data_dir) if data_dir else None, "workers": workers,
        "threads": threads, "global_batch": global_batch, "steps": steps, "measure.warmup": warmup, "seed": seed,
        "compute": compute,
        "method": leading(names), **options.parse_settings(settings),
    }  # fmt: skip
    given = load_plan(plan, where.plan_flags(flags))
    names = _without_single(names) if given.replayed else names
    names = on_several_hosts(names, methods) if given.hosts > 1 else names
    emulated = given.hosts > 1 and not where.is_node
    chosen = options.resolved(given, quiet=as_json or emulated, on_node=where.is_node)
    if emulated:
        from syncline.cli.emulated import on_emulated_hosts

        arguments = ["--methods", ",".join(names), "--steps", str(steps), "--warmup", str(warmup)]
        on_emulated_hosts("compare", chosen, arguments + where.emulated_arguments(run_dir, as_json=as_json))
        return
    # A comparison that was torn in two would be no comparison: it is not started again.
    with where.joined(chosen.replace(max_restarts=0), quiet=as_json) as here:
        run = run_folder(here, run_dir, None, kind="compare", plan=chosen, label=str(chosen.workers))
        with kept(run, here):
            from syncline import worker

            task = (chosen, run, names, as_json)
            rows = options.on_ranks(worker.compare, task, chosen, run.logs, port, here=here)
            summary: dict[str, Any] = {"workers": chosen.workers, "compute": chosen.compute_note}
            summary |= {"global_batch": chosen.global_batch, "rows": rows, "marks": marks_beside(chosen)}
            summary["link"] = link_check()
            if here is None or here.is_first:
                run.write_summary(summary)
    if here is not None and not here.is_first:
        return
    if as_json:
        options.print_json({"run": str(run.path), **summary})
    else:
        _show(chosen, rows, summary["marks"], str(run.path))


def leading(names: Sequence[str]) -> str:
    """The method that decides how many ranks the world has: one that sends, where there is one."""
    return next((name for name in names if not METHODS[name].alone), names[-1])


def method_names(text: str) -> list[str]:
    """The names in a list with commas; an unknown one is refused as the plan would."""
    from syncline.resolve import choose_method

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise PlanError("no method is named.", action=f"Choose some of {', '.join(METHODS)}.")
    rows = [load_plan(None, {"method": word}).method_row for word in words]
    for row in rows:
        if not row.is_choice and not row.takes_turns:
            raise PlanError(
                f"method {row.name} has a world of its own and cannot take turns with the others.",
                action=f"Time it with `syncline train --method {row.name}`.",
            )
    on_one_host, _ = choose_method(device="cpu", workers=2, num_hosts=1)
    return list(dict.fromkeys(on_one_host if row.is_choice else row.name for row in rows))


def _without_single(names: list[str]) -> list[str]:
    """One worker on the whole batch has no recorded times: those are of a worker's share."""
    others = [name for name in names if METHODS[name].world != "worker"]
    if not others:
        raise PlanError(
            f"replayed times are those of one worker's share, so {BASELINE} has none for the whole batch.",
            action=f"Choose other methods, or `syncline train --method {BASELINE}` for one worker on its share.",
        )
    if len(others) < len(names):
        print(f"{BASELINE} is left out: replayed times are those of one worker's share.", file=sys.stderr)
    return others


def on_several_hosts(names: list[str], asked: str) -> list[str]:
    """What can run there: shared memory reaches no further than one host."""
    local = [name for name in names if METHODS[name].in_memory]
    if local and asked != ",".join(DEFAULT):
        raise PlanError(f"method {local[0]} is for ranks of one host.", action="Leave it out with several hosts.")
    return [name for name in names if name not in local]


def _show(plan: Plan, rows: list[dict[str, Any]], marks: list[str], run: str) -> None:
    workload = f"{plan.model} on {plan.data}"
    if plan.replayed:
        workload = f"compute {plan.compute_note}"
    title = f"{workload}, global batch {plan.global_batch}, {plan.workers} workers"
    comparison_table(rows, title=title, steps=plan.steps or 0, warmup=plan.measure.warmup)
    for mark in marks:
        print(mark)
    print(f"run folder {run}; next: syncline verify --workers {plan.workers}")
