"""syncline verify: is what each method computes right?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from syncline.cli import options
from syncline.cli.compare import method_names
from syncline.errors import PlanError
from syncline.methods import METHODS
from syncline.plan import load_plan
from syncline.report.tables import certificate_table

SENDING = [name for name, row in METHODS.items() if row.takes_turns and not row.alone]


def verify(
    workers: Annotated[str, typer.Option(help="World sizes, with commas between.")] = "2",
    methods: Annotated[str, typer.Option(help="Methods to certify, with commas between.")] = ",".join(SENDING),
    models: Annotated[str, typer.Option(help="Models to certify on, with commas between.")] = "cnn,vgg11",
    transfer_dtype: Annotated[
        str | None, typer.Option(help="Certify 16-bit transfers, bf16 or fp16, of the methods that have them.")
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="Batch norm across ranks: local, broadcast or sync; default the method's.")
    ] = None,
    threads: options.Threads = None,
    seed: options.Seed = None,
    port: options.Port = 0,
    as_json: options.Json = False,
) -> None:
    """Prove that each method computes what one worker would.

    Two references: the same shards run one after the other, and one worker on the whole batch.

    Exit code 1 if any certificate fails.
    """
    names = method_names(methods)
    if transfer_dtype:
        names = [name for name in names if "transfer_dtype" in METHODS[name].options]
    if not names or any(METHODS[name].alone for name in names):
        silent = " and ".join(name for name, row in METHODS.items() if row.alone)
        raise PlanError(
            f"there is nothing to certify: {silent} send nothing, and not all methods have 16-bit transfers."
        )
    flags = {"threads": threads, "seed": seed, "options.transfer_dtype": transfer_dtype, "batch_norm": batch_norm}
    rows: list[dict[str, Any]] = []
    for world_size in _world_sizes(workers):
        rows += _certify({**flags, "workers": world_size}, names, models.split(","), port, quiet=as_json)
    passed = all(row["passed"] for row in rows)
    if as_json:
        options.print_json({"passed": passed, "certificates": rows})
    else:
        certificate_table(rows)
        print("all certified; next: syncline compare" if passed else "NOT certified: see WRONG above")
    raise typer.Exit(0 if passed else 1)


def _certify(
    flags: dict[str, Any], methods: list[str], models: list[str], port: int, *, quiet: bool
) -> list[dict[str, Any]]:
    flags = {**flags, "data": "synthetic", "method": methods[0]}
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
