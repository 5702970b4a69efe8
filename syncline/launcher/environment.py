"""Where this process stands among the ranks: the only file that reads rank environment variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and their relatives; the local launcher goes through the same agent
and sets the same ones. Everyone else in the product is handed a `Placement`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import UsageError

LAUNCHER_VARIABLE = "SYNCLINE_LAUNCHER"

# Any one of these says that a launcher was at work. MASTER_ADDR alone does not: people export it in their shell.
_SIGNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NEEDED = (*_SIGNS, "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")


@dataclass(frozen=True)
class Placement:
    """One rank's place. `host_index` counts hosts from 0, as said by the launcher and never guessed from names."""

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


def placement_from_environment(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process's placement, or None when no launcher set anything.

    A partial or contradictory set of variables is a UsageError that names the variable.
    """
    source = os.environ if environment is None else environment
    if not any(name in source for name in _SIGNS):
        return None
    _require_all(source)
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
    )
    _check(placement)
    return placement


def is_rank_variable(name: str) -> bool:
    """True for variables that belong to one rank, and so must not be copied from the launcher to its ranks."""
    return name in _NEEDED or name == LAUNCHER_VARIABLE or name.startswith(_PREFIXES)


def _launcher(source: Mapping[str, str]) -> str:
    if LAUNCHER_VARIABLE in source:
        return source[LAUNCHER_VARIABLE]
    return "torchrun" if "TORCHELASTIC_RUN_ID" in source else "environment"


def _require_all(source: Mapping[str, str]) -> None:
    missing = [name for name in _NEEDED if not source.get(name)]
    if missing:
        present = ", ".join(name for name in _NEEDED if source.get(name))
        raise UsageError(
            f"The environment sets {present} but not {', '.join(missing)}.",
            action=f"Set {missing[0]} too, or start with torchrun; unset the others to run without a launcher.",
        )


def _number(source: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = source.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"The environment variable {name} is {text!r}, which is not a whole number.") from None


def _check(place: Placement) -> None:
    rules = [
        ("WORLD_SIZE", place.world_size >= 1),
        ("RANK", 0 <= place.rank < place.world_size),
        ("LOCAL_WORLD_SIZE", 1 <= place.local_world_size <= place.world_size),
        ("LOCAL_RANK", 0 <= place.local_rank < place.local_world_size and place.local_rank <= place.rank),
        ("GROUP_WORLD_SIZE", 1 <= place.num_hosts <= place.world_size),
        ("GROUP_WORLD_SIZE", place.num_hosts > 1 or place.local_world_size == place.world_size),
        ("GROUP_RANK", 0 <= place.host_index < place.num_hosts),
        ("MASTER_PORT", 0 < place.master_port < 65536),
    ]
    for name, holds in rules:
        if not holds:
            raise UsageError(
                f"The environment variable {name} contradicts the others: rank {place.rank} of {place.world_size}, "
                f"local rank {place.local_rank} of {place.local_world_size}, host {place.host_index} of "
                f"{place.num_hosts}, master port {place.master_port}.",
                action=f"Correct {name}, or let torchrun set all of them.",
            )
