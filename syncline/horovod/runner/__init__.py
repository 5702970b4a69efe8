"""horovod.run: a function on several ranks of this machine, results by rank."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.horovod.common.environment import env
from syncline.horovod.runner.hosts import discovery, slots_of, slots_of_file
from syncline.horovod.runner.ranks import Call, output_files, run_rank
from syncline.launcher.here import run_for_user
from syncline.launcher.here.elastic import MOST_RESETS, Elastic
from syncline.launcher.here.following import following_files

ELASTIC_TIMEOUT_S = 600


@dataclass(frozen=True)
class Settings:
    """What a user asks horovodrun or horovod.run for."""

    num_proc: int
    hosts: str | None = None
    hostfile: str | None = None
    discovery_script: str | None = None
    slots: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: int | None = None
    output_filename: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        asked = (self.discovery_script, self.min_num_proc, self.max_num_proc, self.reset_limit)
        return any(value is not None for value in asked)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks of this machine and return what each returned, by rank.

    Functions travel by cloudpickle. `np`, `min_np` and `max_np` are older names. What concerns ssh, the choice of a
    controller, and checks that Horovod makes before it starts has no effect.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both.")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both.")
    if use_mpi or mpi_args or executable:
        raise UsageError(
            "horovod.run starts its ranks itself: use_mpi, mpi_args and executable are not supported.",
            action="Leave them out, or start a script with mpirun.",
        )
    for name, value in (("np", np), ("min_np", min_np), ("max_np", max_np)):
        if value is not None:
            new = name.replace("np", "num_proc")
            warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
    settings = Settings(
        num_proc=np if np is not None and num_proc == 1 else num_proc,
        hosts=hosts, hostfile=hostfile, slots=slots,
        min_num_proc=min_np if min_num_proc is None else min_num_proc,
        max_num_proc=max_np if max_num_proc is None else max_num_proc,
        reset_limit=reset_limit, output_filename=output_filename,
        environment=network_variables(network_interface) | timeout_variables(start_timeout),
    )  # fmt: skip
    return start((_call, (func, tuple(args), dict(kwargs or {}))), settings, is_script=False)


def start(call: Call, settings: Settings, *, is_script: bool) -> list[Any]:
    """On every rank, to the end."""
    elastic = _elastic(settings)
    _check_slots(settings)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    environment = dict(settings.environment)
    if elastic is not None:
        # A rank that comes late to a new world has yet to load its data.
        environment.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(settings.elastic_timeout or ELASTIC_TIMEOUT_S))
    with contextlib.ExitStack() as stack:
        stack.enter_context(env(**environment))  # ranks find the launcher's environment, until they have ended
        output = settings.output_filename
        if output is not None:
            output = str(Path(output).resolve())
            most = elastic.most if elastic else settings.num_proc
            files = [
                (f"rank {rank}: " if rank else "", path)
                for rank in range(most)
                for path in output_files(output, rank, settings.num_proc)
            ]
            stack.enter_context(following_files(files))
        return run_for_user(
            run_rank, (call, output), workers=settings.num_proc, elastic=elastic, is_script=is_script,
            threads=int(threads) if threads.isdigit() and int(threads) else None, log_dir=None, all_ranks=True,
        )  # fmt: skip


def network_variables(interfaces: str | None) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": interfaces} if interfaces else {}


def timeout_variables(seconds: int | None) -> dict[str, str]:
    """How long hvd.init() waits for other ranks."""
    return {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds)} if seconds else {}


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _elastic(settings: Settings) -> Elastic | None:
    if not settings.is_elastic:
        return None
    number = settings.num_proc
    least, most = settings.min_num_proc or number, settings.max_num_proc or number
    if not 1 <= least <= number <= most:
        raise UsageError(
            f"--min-np {least}, -np {number} and --max-np {most} contradict each other.",
            action="They must not fall.",
        )
    ask = discovery(settings.discovery_script, settings.slots) if settings.discovery_script else None
    resets = MOST_RESETS if settings.reset_limit is None else settings.reset_limit
    return Elastic(least=least, most=most, max_resets=resets, discover=ask)


def _check_slots(settings: Settings) -> None:
    if settings.hosts is None and settings.hostfile is None:
        return
    slots = slots_of(settings.hosts) if settings.hosts else slots_of_file(Path(settings.hostfile or ""))
    if slots < settings.num_proc:
        raise UsageError(
            f"the hosts have {slots} slots, and -np asks for {settings.num_proc} ranks.",
            action="Give more slots (localhost:8), or ask for fewer ranks.",
        )
