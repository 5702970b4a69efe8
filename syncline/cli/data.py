"""syncline data: fetch and verify a data set."""

from __future__ import annotations

from typing import Annotated

import typer

from syncline.cli import options
from syncline.plan import load_plan


def data(
    name: Annotated[str, typer.Argument(help="cifar10, synthetic or auto.")] = "cifar10",
    data_dir: options.DataDir = None,
) -> None:
    """Find or fetch a data set, and verify it."""
    from syncline.resolve import resolve

    plan = load_plan(None, {"data": name, "data_dir": str(data_dir) if data_dir else None})
    plan, sentence = resolve(plan, ranks_per_host=1, progress=options.show_fetch)
    print(sentence)
    where = f" --data-dir {data_dir}" if data_dir else ""
    print(f"next: syncline train --data {plan.data}{where}")
