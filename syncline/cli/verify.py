"""syncline verify: is what each method computes right?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.cli.compare import method_names
from syncline.errors import PlanError
from syncline.plan import METHODS, load_plan
from syncline.report.tables import certificate_table

SENDING = [name for name in METHODS if name != "single"]


def verify(
    workers: Annotated[str, typer.Option(help="World sizes, with commas between.")] = "2",
    methods: Annotated[str, typer.Option(help="Methods to certify, with commas between.")] = ",".join(SENDING),
    models: Annotated[str, typer.Option(help="Models to certify on, with commas between.")] = "cnn,vgg11",
    threads: options.Threads = None,
    seed: options.Seed = None,
    port: options.Port = 0,
    as_json: options.Json = False,
) -> None:
    """Prove that each method computes what one worker would.

    Two references: the same shards run one after the other, and one worker on the whole batch.

    Exit code 1 if any certificate fails.
    """
    rows: list[dict[str, Any]] = []
    for world_size in _world_sizes(workers):
        rows += _certify(world_size, method_names(methods), models.split(","), threads, seed, port, quiet=as_json)
    passed = all(row["passed"] for row in rows)
    if as_json:
        options.print_json({"passed": passed, "certificates": rows})
    else:
        certificate_table(rows)
        print("all certified; next: syncline compare" if passed else "NOT certified: see WRONG above")
    raise typer.Exit(0 if passed else 1)


def _certify(
    world_size: int,
    methods: list[str],
    models: list[str],
    threads: int | None,
    seed: int | None,
    port: int,
    *,
    quiet: bool,
) -> list[dict[str, Any]]:
    if "single" in methods:
        raise PlanError("method single sends nothing, so there is nothing to certify.", action="Leave it out.")
    flags = {"data": "synthetic", "workers": world_size, "threads": threads, "seed": seed, "method": methods[0]}
    for model in models:
        load_plan(None, {**flags, "model": model})
    plan = options.resolved(load_plan(None, flags), quiet=True)
    from syncline import worker

    rows: list[dict[str, Any]] = options.on_ranks(worker.certify, (plan, methods, models, quiet), plan, None, port)
    return rows


def _world_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"--workers {text!r} is not a list of numbers.", action="Write it as 2,4.") from None
    for size in sizes:
        load_plan(None, {"workers": size})
    return sizes
