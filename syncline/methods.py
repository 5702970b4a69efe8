"""The table of methods: everything that code needs to know about a method is in its row.

A new method is a class in `sync/` and a row here. Nothing here loads torch: a wrong name is refused in milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from syncline.units import printable

Collective = Literal["native", "root", "tree", "ring", "halving-doubling", "direct"]
TransferDtype = Literal["bf16", "fp16"]
Unused = Literal["error", "zero"]
Order = Literal["next-use", "ready"]
BatchNorm = Literal["local", "broadcast", "sync"]

_BUCKETED = ("bucket_cap_mb", "transfer_dtype", "overlap", "unused")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row."""

    name: str
    about: str
    """One line for `syncline methods` and the documentation."""
    made_by: str = ""
    """module:class of its GradientSync, or a function that makes one, imported when one is made; empty where the
    name stands for other methods."""
    presets: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that the name stands for; a user's option comes on top."""
    options: tuple[str, ...] = ()
    """The options of a plan that it has."""
    world: Literal["worker", "threads", "tasks", "ranks", "mpiexec"] = "ranks"
    """Who computes: one worker, threads of one process, tasks that one process hands to Spark, processes of any
    launcher, or processes of mpiexec."""
    one_host: bool = False
    """All ranks must be on one host."""
    cpu_only: bool = False
    """Gradients are averaged in the memory of the CPU."""
    in_memory: bool = False
    """Gradients pass through memory that ranks share; no link carries them."""
    overlaps_steps: bool = False
    """An update may still be on its way while the next step computes."""
    broadcasts_buffers: bool = False
    """Rank 0's batch-norm buffers replace the others' before each forward, unless a plan says otherwise."""
    compared: bool = False
    """Part of `syncline compare` by default."""

    @property
    def alone(self) -> bool:
        """One rank takes the whole batch; in a comparison the others wait for it."""
        return self.world in ("worker", "threads", "tasks")

    @property
    def sends_nothing(self) -> bool:
        """Gradients never leave the process."""
        return self.world in ("worker", "threads")

    @property
    def one_process(self) -> bool:
        """All workers of a plan belong to one rank."""
        return self.world in ("threads", "tasks")

    @property
    def is_choice(self) -> bool:
        """The name stands for a method that is chosen before any rank starts."""
        return not self.made_by

    @property
    def takes_turns(self) -> bool:
        """It can run step by step in turn with others, in one world of ranks."""
        return not self.is_choice and self.world != "mpiexec"

    def goes_on(self, options: Mapping[str, Any]) -> bool:
        """With these options, an update may still be on its way while the next step computes."""
        return self.overlaps_steps or ("ahead" in self.options and bool(options.get("ahead")))

    def overlaps(self, options: Mapping[str, Any]) -> bool:
        """With these options, buckets are sent while backward still runs."""
        return "bucket_cap_mb" in self.options and bool({"overlap": True, **self.presets, **options}["overlap"])


_ROWS = (
    Method(
        name="single",
        about="one worker on the whole batch: the baseline, which sends nothing",
        made_by="syncline.sync.base:Single",
        world="worker",
        compared=True,
    ),
    Method(
        name="gather-scatter",
        about="rank 0 gathers each gradient, averages it and scatters the mean back",
        made_by="syncline.sync.after_backward:GatherScatter",
        options=("unused",),
        compared=True,
    ),
    Method(
        name="point-to-point",
        about="the same exchange with rank 0, as concurrent sends and receives",
        made_by="syncline.sync.after_backward:PointToPoint",
        options=("unused",),
        compared=True,
    ),
    Method(
        name="all-reduce",
        about="all-reduces each gradient by itself, after backward",
        made_by="syncline.sync.after_backward:AllReduce",
        options=("unused",),
        compared=True,
    ),
    Method(
        name="ddp",
        about="PyTorch's own DistributedDataParallel, as the control",
        made_by="syncline.sync.ddp:DDP",
        options=("bucket_cap_mb", "unused"),
        broadcasts_buffers=True,
        compared=True,
    ),
    Method(
        name="bucketed",
        about="all-reduces buckets of gradients while backward still runs",
        made_by="syncline.sync.bucketed:Bucketed",
        options=(*_BUCKETED, "groups", "collective"),
        compared=True,
    ),
    Method(
        name="ahead",
        about="bucketed, with the gradients that the next forward needs first sent first, on into that forward",
        made_by="syncline.sync.ahead:Ahead",
        options=("chunk_mb", "transfer_dtype", "collective", "order", "barrier", "strict", "unused"),
        overlaps_steps=True,
    ),
    Method(
        name="ring",
        about="bucketed, with each bucket passed around a ring",
        made_by="syncline.sync.bucketed:Bucketed",
        presets={"collective": "ring"},
        options=(*_BUCKETED, "groups"),
    ),
    Method(
        name="tree",
        about="bucketed, with each bucket summed up a binary tree and sent back down",
        made_by="syncline.sync.bucketed:Bucketed",
        presets={"collective": "tree"},
        options=(*_BUCKETED, "groups"),
    ),
    Method(
        name="halving-doubling",
        about="bucketed, with recursive halving and doubling for each bucket",
        made_by="syncline.sync.bucketed:Bucketed",
        presets={"collective": "halving-doubling"},
        options=(*_BUCKETED, "groups"),
    ),
    Method(
        name="shared-memory",
        about="ranks on one host average in memory that they share; nothing is sent",
        made_by="syncline.sync.shared_memory:SharedMemory",
        options=("unused",),
        one_host=True,
        cpu_only=True,
        in_memory=True,
        compared=True,
    ),
    Method(
        name="hierarchical",
        about="shared memory within each host, bucketed between the hosts' leaders, or ahead with that option",
        made_by="syncline.sync.hierarchical:make",
        options=(*_BUCKETED, "collective", "ahead"),
        cpu_only=True,
    ),
    Method(
        name="thread-replicas",
        about="one process with a model replica on a thread per worker; torch's DataParallel on GPUs",
        made_by="syncline.sync.replicas:Replicated",
        world="threads",
        one_host=True,
    ),
    Method(
        name="tree-aggregate",
        about="each step a Spark job: weights by broadcast, gradients summed by treeAggregate through the driver",
        made_by="syncline.sync.tree_aggregate:TreeAggregate",
        world="tasks",
        one_host=True,
        cpu_only=True,
        broadcasts_buffers=True,
    ),
    Method(
        name="mpi",
        about="bucketed over MPI, started with mpiexec",
        made_by="syncline.sync.bucketed:Bucketed",
        presets={"overlap": False},  # MPI makes progress only inside its calls
        options=(*_BUCKETED, "collective"),
        world="mpiexec",
        one_host=True,
        cpu_only=True,
    ),
    Method(
        name="auto",
        about="shared-memory if all ranks are on one host, otherwise ahead, or bucketed where ahead cannot run",
        options=("bucket_cap_mb", "unused"),
    ),
)
METHODS: Mapping[str, Method] = {row.name: row for row in _ROWS}

BASELINE = "single"
"""What speed-up is measured against."""
CONTROL = "ddp"
"""What people use today: every method is timed against it."""
ON_LINKS = "bucketed"
"""What `auto` chooses where gradients must travel."""
BETWEEN_HOSTS = "ahead"
"""What `auto` chooses where links may be slow: with little to gain it sends as ON_LINKS does."""
IN_MEMORY = "shared-memory"
"""What `auto` chooses where they need not."""
BLOCK = 8
"""Steps of a turn in a comparison with a method whose transfers go on into the next step."""
PLANNED_AFTER = 15
"""Steps after which such a method has planned its transfers."""

OLD_NAMES = {"data-parallel": "thread-replicas"}
"""Names of earlier versions, accepted wherever a method is named."""


def current_name(name: str, *, typed: bool = False) -> str:
    """Today's name. An old name warns if a user has just typed it, and not if it comes from a stored file."""
    today = OLD_NAMES.get(name, name)
    if typed and today != name:
        warnings.warn(f"method {name} is now called {today}; the old name still works.", FutureWarning, stacklevel=3)
    return today


def current_label(label: str) -> str:
    """The same for what a log or a table calls a method: 'single, all cores' stays as it is."""
    name, comma, rest = printable(label).partition(",")  # whoever wrote the log
    return current_name(name) + comma + rest


def with_current_names(document: Any) -> Any:
    """A study's file with today's names wherever a key `method` or `methods` holds an old one; warns about each."""
    if isinstance(document, Mapping):
        return {
            key: _renamed(value) if key in ("method", "methods") else with_current_names(value)
            for key, value in document.items()
        }
    return [with_current_names(item) for item in document] if isinstance(document, list) else document


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    return current_name(value, typed=True) if isinstance(value, str) else with_current_names(value)


def method_of(label: str) -> Method:
    """The row for what a log or a table calls a method; an empty row for an unknown name."""
    name = current_label(label).partition(",")[0]
    return METHODS.get(name) or Method(name=label, about="")
