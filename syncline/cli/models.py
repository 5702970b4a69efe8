"""syncline models: what there is to train, and what each costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from syncline.cli import options
from syncline.report.terminal import print_table
from syncline.units import format_bytes
from syncline.words import MODELS


def models(
    as_json: options.Json = False,
    names: Annotated[list[str] | None, typer.Argument(help="Some of the models; all if absent.")] = None,
) -> None:
    """List the models: parameters, bytes of gradients, operations per sample.

    At each model's usual input and number of classes; with other data they are the data's.
    """
    from syncline.plan import load_plan
    from syncline.workload.dry_run import profile

    for name in names or ():
        load_plan(None, {"model": name})
    profiles = [profile(name) for name in names or MODELS]
    if as_json:
        about = {name: model.about for name, model in MODELS.items()}
        options.print_json([asdict(one) | {"about": about.get(one.name, "")} for one in profiles])
        return
    rows = [
        [
            one.name,
            f"{one.parameters:,}",
            format_bytes(one.gradient_bytes),
            _giga(one.forward_flops),
            _giga(one.training_flops),
            "x".join(map(str, one.input_shape)) + (" tokens" if one.unit == "tokens" else ""),
            f"{one.num_classes:,}",
        ]
        for one in profiles
    ]
    columns = ["model", "parameters", "gradients", "GFLOPs forward", "GFLOPs training", "input", "classes"]
    caption = (
        "GFLOPs: per sample, multiplications and additions of convolutions and matrix products; training is\n"
        "forward and backward. Your own model: module:callable. Next: syncline train --model NAME --data synthetic"
    )
    print_table(columns, rows, caption=caption)


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.3g}"
