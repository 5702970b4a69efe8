"""syncline doctor: is this machine ready to run, and the link to the others?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import UsageError
from syncline.readiness import make_ready
from syncline.store import ROOT
from syncline.voice import Voice


def doctor(
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT of node 0; also examine the link to it.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes; run this command on all of them at once.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="This node's number, counted from 0.")] = None,
    token_file: options.TokenFile = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for other nodes.")] = 60.0,
    when_busy: options.WhenBusy = "go",
    folder: Annotated[Path, typer.Option(help="Where runs and checkpoints are written.")] = ROOT,
    as_json: options.Json = False,
) -> None:
    """Examine this machine, and with --rendezvous the link to node 0.

    Each line says ok, warn or fail, and what to do. Exit code 1 if anything fails.
    """
    from syncline.launcher.doctor import (
        Finding,
        check_group,
        examine_machine,
        examine_nodes,
        examine_system,
        examine_way,
    )
    from syncline.launcher.nodes.token import Tokens
    from syncline.launcher.route import find_route

    group = check_group(nodes, node_rank, wait)
    if when_busy != "go":
        make_ready(when_busy, Voice("progress" if as_json else "all"))
    if group is not None and rendezvous is None:
        raise UsageError("--nodes needs --rendezvous.", action="Write it as --rendezvous node0:29500.")
    route = find_route(rendezvous) if rendezvous else None
    findings: list[Finding] = [*examine_system(), *examine_machine(folder)]
    if route is not None:
        findings.append(examine_way(route))
    if route is not None and rendezvous is not None and group is not None:
        findings += examine_nodes(route, group, folder, Tokens(rendezvous, token_file, folder))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        options.print_json({"passed": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            fix = f". {finding.fix}" if finding.fix else ""
            print(f"{finding.status:<5} {finding.what}: {finding.found}{fix}")
        print("fix what failed first" if failed else "ready to run; next: syncline train")
    raise typer.Exit(1 if failed else 0)
