"""The rank that a launcher gave us: the only file that reads and writes rank environment variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and their relatives, and our own launcher sets the same ones. mpiexec sets
others, which differ between Open MPI and MPICH, and Slurm's srun its own, and so did Horovod's launcher; torchrun's
win where both are there, then Horovod's, then mpiexec's. Everyone else in the product is handed a `Placement`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import UsageError
from syncline.launcher.watch import ancestors

LAUNCHER_VARIABLE = "SYNCLINE_LAUNCHER"
HOSTS_VARIABLE = "SYNCLINE_HOST_NAMES"
ELASTIC_VARIABLE = "SYNCLINE_ELASTIC"
"""Port of the store of an elastic run's launcher, and the slot of this process in it."""

# Any one of these says that a launcher was at work. MASTER_ADDR alone does not: people export it in their shell.
_SIGNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NEEDED = (*_SIGNS, "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HOROVOD = tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MOST_HOSTS = 100_000
_MPI_PROGRAMS = ("hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "prterun", "prted", "orted")
_MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HYDI_", "PRTE_")


@dataclass(frozen=True)
class Placement:
    """One rank's place. `host_index` counts hosts from 0, as said by the launcher and never guessed from names.

    mpiexec and srun give no meeting point: there `master_addr` is empty and `master_port` 0, unless the user set
    them; `find_meeting` finds one from the rest.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_index: int
    num_hosts: int
    master_addr: str
    master_port: int
    launcher: str
    run_id: str
    restart: int = 0
    """How often the launcher has started all ranks before; above 0 there may be a checkpoint to resume from."""
    host_names: tuple[str, ...] = ()
    """By host index, where the launcher knows them."""
    job: str = ""
    """The same text for all ranks of a job of mpiexec or srun, and another one for every other job."""

    @property
    def first_host(self) -> str:
        return self.host_names[0] if self.host_names else ""

    def name_of(self, rank: int) -> str:
        """A rank with its host's name, where there are several hosts."""
        if self.num_hosts < 2 or len(self.host_names) != self.num_hosts:
            return f"rank {rank}"
        return f"rank {rank} on host {self.host_names[rank // self.local_world_size]}"


def placement_from_environment(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process's placement, or None when no launcher set anything.

    A partial or contradictory set of variables is a UsageError that names the variable.
    """
    source = os.environ if environment is None else environment
    if not any(name in source for name in _SIGNS):
        return _placement_from_horovod(source) or _placement_from_mpi(source) or _placement_from_slurm(source)
    _require_all(source, _NEEDED, "or start with torchrun")
    local_world_size = _number(source, "LOCAL_WORLD_SIZE")
    rank, world_size = _number(source, "RANK"), _number(source, "WORLD_SIZE")
    placement = Placement(
        rank=rank,
        world_size=world_size,
        local_rank=_number(source, "LOCAL_RANK"),
        local_world_size=local_world_size,
        # Launchers other than torchrun often leave the group out; equal hosts in rank order is what they all do.
        host_index=_number(source, "GROUP_RANK", rank // max(local_world_size, 1)),
        num_hosts=_number(source, "GROUP_WORLD_SIZE", world_size // max(local_world_size, 1)),
        master_addr=source["MASTER_ADDR"],
        master_port=_number(source, "MASTER_PORT"),
        launcher=_launcher(source),
        run_id=source.get("TORCHELASTIC_RUN_ID", ""),
        restart=_number(source, "TORCHELASTIC_RESTART_COUNT", 0),
        host_names=tuple(source.get(HOSTS_VARIABLE, "").split()),
    )
    _check(placement)
    return placement


def horovod_variables(place: Placement) -> dict[str, str]:
    """What Horovod's launcher would set for the rank in this place, for scripts that read it."""
    values = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    cross = {"HOROVOD_CROSS_RANK": str(place.host_index), "HOROVOD_CROSS_SIZE": str(place.num_hosts)}
    return {**dict(zip(_HOROVOD, map(str, values), strict=True)), **cross}


def _placement_from_horovod(source: Mapping[str, str]) -> Placement | None:
    """Of a launcher that sets Horovod's variables. Where ranks meet must be said beside them."""
    if _HOROVOD[0] not in source:
        return None
    _require_all(source, (*_HOROVOD, "MASTER_ADDR", "MASTER_PORT"), "or start with horovodrun")
    rank, world_size, local_rank, local_world_size = (_number(source, name) for name in _HOROVOD)
    placement = Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host_index=_number(source, "HOROVOD_CROSS_RANK", rank // max(local_world_size, 1)),
        num_hosts=_number(source, "HOROVOD_CROSS_SIZE", -(-world_size // max(local_world_size, 1))),
        master_addr=source["MASTER_ADDR"],
        master_port=_number(source, "MASTER_PORT"),
        launcher=source.get(LAUNCHER_VARIABLE, "horovod"),
        run_id="",
    )
    _check(placement, _HOROVOD)
    return placement


def torchrun_variables(place: Placement, max_restarts: int, log_dir: Path) -> dict[str, str]:
    """What torchrun would set for the rank in this place, and who set it.

    TORCHELASTIC_USE_AGENT_STORE tells ranks that the launcher serves the store, so that rank 0 does not.
    """
    return {
        **_variables(place),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(log_dir / "outcomes" / f"rank-{place.rank}.torch.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        LAUNCHER_VARIABLE: place.launcher,
    }


def take_place(place: Placement) -> None:
    """From now on this process is there, for everybody who reads the environment."""
    os.environ.update(_variables(place))


def elastic_from_environment() -> tuple[int, int, Placement] | None:
    """Port, slot and place of a process whose launcher can replace ranks."""
    text, place = os.environ.get(ELASTIC_VARIABLE, ""), placement_from_environment()
    if not text or place is None:
        return None
    port, slot = text.split()
    return int(port), int(slot), place


def _variables(place: Placement) -> dict[str, str]:
    rank, world_size = str(place.rank), str(place.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.host_index),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
    }


def is_rank_variable(name: str) -> bool:
    """True for variables that belong to one rank, and so must not be copied from the launcher to its ranks."""
    known = (
        *_NEEDED,
        *_MPICH,
        *_HOROVOD,
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        LAUNCHER_VARIABLE,
        ELASTIC_VARIABLE,
    )
    return name in known or name.startswith((*_PREFIXES, *_MPI_PREFIXES))


def _placement_from_mpi(source: Mapping[str, str]) -> Placement | None:
    source = _with_slurm_as_mpiexec(source)
    names = next((names for names in (_OPEN_MPI, _MPICH) if names[0] in source), None)
    if names is None:
        return None
    _require_all(source, names, "or start with mpiexec")
    rank, world_size, local_rank, local_world_size = (_number(source, name) for name in names)
    placement = Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # mpiexec fills one equal host after the other; where the user chose otherwise, MPI itself knows better.
        host_index=rank // max(local_world_size, 1),
        num_hosts=-(-world_size // max(local_world_size, 1)),
        master_addr=source.get("MASTER_ADDR", ""),
        master_port=_number(source, "MASTER_PORT", 0),
        launcher=source.get(LAUNCHER_VARIABLE, "mpi"),
        run_id="",
        host_names=_slurm_hosts(source),
        job=_mpi_job(source),
    )
    _check(placement, names)
    return placement


def _placement_from_slurm(source: Mapping[str, str]) -> Placement | None:
    """srun without MPI. A batch script has some of the variables too, but not the step's."""
    if "SLURM_PROCID" not in source or "SLURM_STEP_TASKS_PER_NODE" not in source:
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    _require_all(source, (*names, "SLURM_NODEID"), "or start with srun")
    counts = expand_tasks(source["SLURM_STEP_TASKS_PER_NODE"])
    host = _number(source, "SLURM_NODEID")
    placement = Placement(
        rank=_number(source, "SLURM_PROCID"),
        world_size=_number(source, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(source, "SLURM_LOCALID"),
        local_world_size=counts[host] if 0 <= host < len(counts) else 0,
        host_index=host,
        num_hosts=len(counts),
        master_addr=source.get("MASTER_ADDR", ""),
        master_port=_number(source, "MASTER_PORT", 0),
        launcher=source.get(LAUNCHER_VARIABLE, "slurm"),
        run_id="",
        host_names=_slurm_hosts(source),
        job=_slurm_job(source),
    )
    _check(placement, names)
    return placement


def _slurm_hosts(source: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(expand_hosts(source.get("SLURM_STEP_NODELIST") or source.get("SLURM_JOB_NODELIST") or ""))


def _slurm_job(source: Mapping[str, str]) -> str:
    job = source.get("SLURM_JOB_ID", "")
    return f"slurm {job}.{source.get('SLURM_STEP_ID', '')}" if job else ""


def _mpi_job(source: Mapping[str, str]) -> str:
    """Open MPI names its jobs; Hydra, MPICH's, does not, but one process of it starts all ranks of a host."""
    if source.get("PMIX_NAMESPACE"):
        return f"pmix {source['PMIX_NAMESPACE']}"
    started_by = next((pid for pid, name in ancestors(os.getpid()) if name in _MPI_PROGRAMS), None)
    return _slurm_job(source) or (f"mpi {started_by}" if started_by else "")


def _with_slurm_as_mpiexec(source: Mapping[str, str]) -> Mapping[str, str]:
    """srun starts MPI ranks too, with some of the variables under names of its own.

    Its variables alone are no sign of a rank: they are set in a batch script as well.
    """
    started = ("PMI_RANK" in source or "PMIX_RANK" in source) and "SLURM_STEP_TASKS_PER_NODE" in source
    if not started or any(name in source for name in (_OPEN_MPI[0], "MPI_LOCALRANKID")):
        return source
    counts = expand_tasks(source["SLURM_STEP_TASKS_PER_NODE"])
    host = _number(source, "SLURM_NODEID", 0)
    values = (
        source.get("SLURM_PROCID", ""),
        str(sum(counts)),
        source.get("SLURM_LOCALID", ""),
        str(counts[host]) if host < len(counts) else "",
    )
    return {**source, **dict(zip(_MPICH, values, strict=True))}


def _launcher(source: Mapping[str, str]) -> str:
    if LAUNCHER_VARIABLE in source:
        return source[LAUNCHER_VARIABLE]
    return "torchrun" if "TORCHELASTIC_RUN_ID" in source else "environment"


def _require_all(source: Mapping[str, str], needed: Sequence[str], instead: str) -> None:
    missing = [name for name in needed if not source.get(name)]
    if missing:
        present = ", ".join(name for name in needed if source.get(name))
        raise UsageError(
            f"The environment sets {present} but not {', '.join(missing)}.",
            action=f"Set {missing[0]} too, {instead}; unset the others to run without a launcher.",
        )


def _number(source: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = source.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"The environment variable {name} is {text!r}, which is not a whole number.") from None


def _check(place: Placement, names: Sequence[str] = _SIGNS) -> None:
    rank, world_size, local_rank, local_world_size = names
    rules = [
        (world_size, place.world_size >= 1),
        (rank, 0 <= place.rank < place.world_size),
        (local_world_size, 1 <= place.local_world_size <= place.world_size),
        (local_rank, 0 <= place.local_rank < place.local_world_size and place.local_rank <= place.rank),
        ("GROUP_WORLD_SIZE", 1 <= place.num_hosts <= place.world_size),
        ("GROUP_WORLD_SIZE", place.num_hosts > 1 or place.local_world_size == place.world_size),
        ("GROUP_RANK", 0 <= place.host_index < place.num_hosts),
        ("MASTER_PORT", 0 < place.master_port < 65536 or not place.master_addr),
    ]
    for name, holds in rules:
        if not holds:
            raise UsageError(
                f"The environment variable {name} contradicts the others: rank {place.rank} of {place.world_size}, "
                f"local rank {place.local_rank} of {place.local_world_size}, host {place.host_index} of "
                f"{place.num_hosts}, master port {place.master_port}.",
                action=f"Correct {name}, or let the launcher set all of them.",
            )


def expand_hosts(text: str) -> list[str]:
    """'a[01-03,7]b,c' -> a01b, a02b, a03b, a7b, c. In Slurm's order, which is the order of its node numbers."""
    hosts: list[str] = []
    for name in _split(text):
        hosts += _expand(name)
        if len(hosts) > _MOST_HOSTS:
            raise UsageError(f"the host list {text!r} names more than {_MOST_HOSTS:,} hosts.")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """'4(x2),3' -> 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"cannot read the task counts {text!r}.", action="Write them like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    return [name.strip() for name in re.findall(r"(?:[^,\[]|\[[^\]]*(?:\]|$))+", text) if name.strip()]


def _expand(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, closing, after = rest.partition("]")
    if not closing:
        raise UsageError(f"the host list {name!r} has an unclosed bracket.")
    return [before + number + end for number in _numbers(inside) for end in _expand(after)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) - int(low) > _MOST_HOSTS):
            raise UsageError(f"cannot read [{text}] in the host list.", action="Write it like [01-03,7].")
        # Leading zeros belong to the name: node[08-10] is node08, node09, node10.
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers
