"""syncline verify: is what each method computes right?"""

from __future__ import annotations

from typing import Annotated

import typer

from syncline import jobs
from syncline.cli import options
from syncline.launcher.places import Here
from syncline.report.terminal import certificate_table


def verify(
    workers: Annotated[str, typer.Option(help="World sizes, with commas between.")] = "2",
    methods: Annotated[str, typer.Option(help="Methods to certify, with commas between.")] = ",".join(jobs.SENDING),
    models: Annotated[str, typer.Option(help="Models to certify on, with commas between.")] = "cnn,vgg11",
    transfer_dtype: Annotated[
        str | None, typer.Option(help="Certify 16-bit transfers, bf16 or fp16, of the methods that have them.")
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="Batch norm across ranks: local, broadcast or sync; default the method's.")
    ] = None,
    threads: options.Threads = None,
    seed: options.Seed = None,
    hosts: options.Hosts = None,
    link: options.Link = None,
    port: options.Port = 0,
    as_json: options.Json = False,
) -> None:
    """Prove that each method computes what one worker would.

    Two references: the same shards run one after the other, and one worker on the whole batch.

    Exit code 1 if any certificate fails.
    """
    certificates = jobs.verify(
        workers=options.numbers(workers, "--workers"), methods=options.names(methods), models=options.names(models),
        transfer_dtype=transfer_dtype, batch_norm=batch_norm, threads=threads, seed=seed, hosts=hosts, link=link,
        place=None if hosts else Here(port), show="progress" if as_json else "all",
    )  # fmt: skip
    if as_json:
        options.print_json({"passed": certificates.holds, "certificates": certificates.rows})
    else:
        certificate_table(certificates.rows)
        print("all certified; next: syncline compare" if certificates.holds else "NOT certified: see WRONG above")
    raise typer.Exit(0 if certificates.holds else 1)
