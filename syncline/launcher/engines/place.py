"""The place of a run on an engine, and `launch` there."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from syncline.errors import PlanError
from syncline.launcher import engines
from syncline.launcher.engines.driving import run_on
from syncline.launcher.engines.seam import Engine as Connected
from syncline.launcher.home import Address, Home
from syncline.launcher.places import Place, Ranks
from syncline.plan import Plan
from syncline.voice import Voice


class Engine(Place):
    """Ranks on Ray or Spark: `place=syncline.Engine("ray", "auto")`.

    `address` is Ray's --address or Spark's --master; without one, as docs/engines.md says. Each use case connects
    and leaves again; `with place.opened():` around several of them keeps the connection.
    """

    def __init__(self, name: str, address: str | None = None) -> None:
        engines.check_engine(name)
        self.name = name
        self.address = address
        self._engine: Connected | None = None

    @property
    def flags(self) -> list[str]:
        """What leads here on the command line."""
        row = engines.check_engine(self.name)
        return ["--engine", self.name, *([row.flag, self.address] if self.address else [])]

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self._engine is not None:
            yield
            return
        self._engine = engines.connect(self.name, self.address)
        try:
            yield
        finally:
            engine, self._engine = self._engine, None
            engine.close()

    def settled(self, plan: Plan) -> Plan:
        if plan.link is not None:
            raise PlanError("the plan's link applies only to emulated hosts.", action="Remove it to use --engine.")
        if (own := {"mpiexec": "mpiexec", "tasks": "a Spark of its own"}.get(plan.method_row.world)) is not None:
            raise PlanError(
                f"method {plan.method} starts its workers with {own}, not on {self.name}.", action="Choose another."
            )
        asked = plan.hosts if plan.hosts > 1 else None
        layout = self._connected.layout(plan.num_ranks, plan.threads, asked)
        return plan.replace(hosts=layout.hosts, threads=layout.threads)

    def ranks_here(self, plan: Plan) -> int:
        """On a cluster, the engine itself sees to it that ranks share no cores."""
        return plan.workers if self._connected.is_own else 1

    @contextmanager
    def joined(self, plan: Plan, voice: Voice) -> Iterator[Ranks]:
        with self.opened(), ExitStack() as at_end:
            yield _RanksOnEngine(self._connected, shlex.join(self.flags), at_end)

    @property
    def _connected(self) -> Connected:
        assert self._engine is not None, "used outside of opened()"
        return self._engine


class _RanksOnEngine(Ranks):
    def __init__(self, engine: Connected, flags: str, at_end: ExitStack) -> None:
        self._engine = engine
        self._at_end = at_end
        self.how_to_resume = f" {flags}"

    def home(self, path: Path, created: str) -> Address | None:
        if self._engine.is_own:
            return None  # on this machine
        home = Home(self._engine.address, secrets.token_hex(16), path, created)
        self._at_end.callback(home.close)
        return home.address

    def run(self, function: Callable[..., Any], args: Sequence[Any], plan: Plan, log_dir: Path | None) -> Any:
        return run_on(
            self._engine, function, args, workers=plan.num_ranks, log_dir=log_dir, threads=plan.threads,
            hosts=plan.hosts, max_restarts=plan.max_restarts, needs_folder=log_dir is not None,
        )[0]  # fmt: skip


def launch_on(
    name: str, address: str | None, function: Callable[..., Any], *, workers: int, threads: int | None, log_dir: Path
) -> list[Any]:
    """`syncline.launch` with an engine."""
    place = Engine(name, address)
    with place.opened():
        engine = place._connected
        layout = engine.layout(workers, threads, None)
        return run_on(engine, function, workers=workers, log_dir=log_dir, threads=layout.threads, hosts=layout.hosts)
