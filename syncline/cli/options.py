"""What the verbs share: plan flags, where ranks run, JSON."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.errors import PlanError
from syncline.files import to_json
from syncline.launcher import engines, places
from syncline.launcher.nodes import Node
from syncline.plan import Plan
from syncline.store import ROOT

if TYPE_CHECKING:
    from syncline.launcher.engines.place import Engine as EnginePlace

Model = Annotated[
    str | None, typer.Option(help="A built-in model (see `syncline models`), or your own: module:callable.")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="auto, cifar10, synthetic, synthetic-ages, imdb-wiki, folder or text; or your own: module:callable."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data (or set SYNCLINE_DATA).")]
Workers = Annotated[int | None, typer.Option(help="Number of ranks.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads per worker; default cores / workers.")]
GlobalBatch = Annotated[
    int | None, typer.Option(help="Samples per step over all workers; default 256, or 8 for texts.")
]
OptimizerName = Annotated[str | None, typer.Option("--optimizer", help="sgd, adamw or adam; default: the recipe's.")]
ClipNorm = Annotated[float | None, typer.Option(help="Scale a gradient whose norm is larger down to this norm.")]
Precision = Annotated[str | None, typer.Option(help="float32, or bf16: multiply 16-bit numbers.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
RunDir = Annotated[
    str | None, typer.Option(help="Folder for the run, or a URL such as s3://bucket/run; default runs/DATE-….")
]
Port = Annotated[int, typer.Option(help="Port where ranks meet; 0 picks a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Compute = Annotated[
    str | None,
    typer.Option(
        help="real; or sleep instead of computing: replay:RUN (times recorded there), sleep:FILE (times in a file)."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set any plan key: KEY=VALUE, e.g. optimizer.learning_rate=0.05.")
]
MaxRestarts = Annotated[
    int | None, typer.Option(help="Restarts from the last checkpoint after a rank fails; default 0.")
]
Hosts = Annotated[int | None, typer.Option(help="Number of hosts to emulate on this machine.")]
WorkersPerHost = Annotated[int | None, typer.Option(help="Ranks per host or node; default 1.")]
Link = Annotated[
    str | None, typer.Option(help="Rate of the emulated links, e.g. 1gbit; one for all, or one per host.")
]
Nodes = Annotated[int | None, typer.Option(help="Number of machines; run this command on each one.")]
NodeRank = Annotated[int | None, typer.Option(help="This machine's number, counted from 0; see --nodes.")]
Rendezvous = Annotated[str | None, typer.Option(help="HOST:PORT of machine 0, where all machines meet; see --nodes.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token that machine 0 prints (or set SYNCLINE_TOKEN); see --nodes.")
]
Engine = Annotated[
    str | None, typer.Option(help="Run the ranks on a cluster's engine: ray or spark. See docs/engines.md.")
]
Address = Annotated[
    str | None,
    typer.Option(help="For --engine ray: auto, or HOST:PORT; default RAY_ADDRESS, or a Ray of its own for this run."),
]
Master = Annotated[
    str | None,
    typer.Option(
        help="For --engine spark: spark://HOST:PORT, yarn or k8s://…; default a Spark of its own for this run."
    ),
]
JoinTimeout = Annotated[float, typer.Option(help="Seconds to wait for the other machines.")]
WhenBusy = Annotated[
    str,
    typer.Option(help="If other programs keep the machine busy: go (and mark the results), wait, or refuse."),
]
PrintPlan = Annotated[bool, typer.Option("--print-plan", help="Print the resolved plan as TOML and exit.")]


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """`optimizer.learning_rate=0.05` as a plan override; a value that is not TOML is taken as text."""
    parsed: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        if not equals:
            raise PlanError(f"--set {setting!r} has no '='.", action="Write it as --set KEY=VALUE.")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text.strip()
    return parsed


@dataclass(frozen=True)
class EngineFlags:
    """The flags that name an engine, and lead to it."""

    name: str
    addresses: Mapping[str, str]
    """By flag, those that were given."""

    def place(self) -> EnginePlace:
        row = engines.check_engine(self.name)
        for flag in self.addresses:
            if flag != row.flag:
                raise PlanError(f"{flag} is not for engine {self.name}, which takes {row.flag}.")
        from syncline.launcher.engines.place import Engine as Place

        return Place(self.name, self.addresses.get(row.flag))


def engine_flags(name: str | None, address: str | None, master: str | None) -> EngineFlags | None:
    """None where no engine was asked for."""
    flags = {"--address": address, "--master": master}
    given = {flag: value for flag, value in flags.items() if value is not None}
    if name is None and given:
        raise PlanError(f"{next(iter(given))} needs --engine.")
    return None if name is None else EngineFlags(name, given)


@dataclass(frozen=True)
class Where:
    """The flags that say where ranks run."""

    hosts: int | None
    workers_per_host: int | None
    link: str | None
    nodes: int | None
    node_rank: int | None
    rendezvous: str | None
    join_timeout_s: float
    port: int = 0
    token_file: Path | None = None
    engine: EngineFlags | None = None

    def __post_init__(self) -> None:
        if self.engine is not None and (self.nodes is not None or self.link is not None or self.port):
            raise PlanError("--engine starts ranks itself: give no --nodes, --link or --port with it.")
        node_flags = {"--nodes": self.nodes, "--node-rank": self.node_rank, "--rendezvous": self.rendezvous}
        missing = [name for name, value in node_flags.items() if value is None]
        if 0 < len(missing) < len(node_flags):
            raise PlanError(f"{', '.join(missing)} is missing: a node needs {', '.join(node_flags)}.")
        if self.nodes is not None and (self.hosts is not None or self.link is not None):
            raise PlanError(
                "--hosts and --link are for emulated hosts and --nodes is for real machines: use one or the other."
            )
        if self.token_file is not None and self.nodes is None:
            raise PlanError("--token-file needs --nodes.")
        if self.workers_per_host is not None and self.num_hosts is None:
            raise PlanError("--workers-per-host needs --hosts or --nodes.")
        if self.join_timeout_s <= 0:
            raise PlanError(
                f"--join-timeout {self.join_timeout_s:g} is not a time.", action="Give a number of seconds above 0."
            )

    @property
    def adds_nothing(self) -> bool:
        """No flag changes the plan: only which of its nodes this is."""
        return self.hosts is None and self.workers_per_host is None and self.link is None

    @property
    def num_hosts(self) -> int | None:
        return self.nodes if self.nodes is not None else self.hosts

    def workers(self, workers: int | None) -> int | None:
        """--workers is the number on all hosts together."""
        if self.workers_per_host is None:
            return workers
        if workers is not None:
            raise PlanError("--workers and --workers-per-host contradict each other: use only one.")
        return (self.num_hosts or 1) * self.workers_per_host

    def place(self, plan: Plan) -> places.Place:
        if self.engine is not None:
            return self.engine.place()
        if self.nodes is not None and self.node_rank is not None and self.rendezvous is not None:
            return places.Nodes(
                Node(
                    self.nodes, self.node_rank, self.rendezvous, self.join_timeout_s, token_file=self.token_file,
                    folder=ROOT,
                )
            )  # fmt: skip
        return places.EmulatedHosts(self.join_timeout_s) if plan.hosts > 1 else places.Here(self.port)


def names(text: str) -> list[str]:
    """The words of a list separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"{flag} {text!r} is not a list of numbers.", action="Write it as 1,2,4.") from None


def print_json(document: Any) -> None:
    print(to_json(document, indent=2))
