"""Plan: what to run. Frozen, TOML in and out; an error names every unknown or contradictory key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, NonNegativeInt, field_validator, model_validator

from syncline.errors import PlanError, RunFolderError
from syncline.files import read_regular
from syncline.forms import Section, checked, unknown_value
from syncline.methods import (
    CONTROL,
    METHODS,
    BatchNorm,
    Collective,
    Method,
    Order,
    TransferDtype,
    Unused,
    current_name,
    method_of,
)
from syncline.optimizers import Optimizer, reads_texts, with_recipe
from syncline.units import printable
from syncline.words import BATCH_OF_TEXTS, DATA, IN_FILES, MODELS, RECIPES

Precision = Literal["float32", "bf16"]
MOST_RANKS = 2**20
MOST_THREADS = 2**14
OnNan = Literal["stop", "warn", "ignore"]


class Options(Section):
    """Options of the method; a method refuses options that it does not have."""

    bucket_cap_mb: float | None = Field(None, gt=0, le=1e9)
    """Maximum size of a gradient bucket in MB; default 25."""
    collective: Collective | None = None
    """How a bucket travels; default native, or direct with a transfer_dtype."""
    transfer_dtype: TransferDtype | None = None
    """Send 16-bit values and sum them in 32 bits. Lossy."""
    groups: int | None = Field(None, ge=1, le=1024)
    """Number of process groups that buckets use in turn; default 1."""
    overlap: bool | None = None
    """Send while backward runs; default true."""
    unused: Unused | None = None
    """How to treat a parameter that only some ranks use: error (the default), or zero where it is unused."""
    chunk_mb: float | None = Field(None, gt=0, le=1e9)
    """Size of the pieces that gradients travel in, in MB; default by what the link's start-up time allows."""
    order: Order | None = None
    """Send first what the next forward uses first (next-use, the default), or what is ready first."""
    barrier: bool | None = None
    """Wait for all gradients at the end of backward; default if waiting costs less than 3 % by prediction."""
    ahead: bool | None = None
    """Between hosts, send first what the next forward uses first, and on into it; default false."""
    strict: bool | None = None
    """Show NaN to whatever reads a weight before its update; default in the first steps."""


class Measure(Section):
    warmup: int = Field(1, ge=0)
    """Steps at the start that are not counted."""
    window: int | None = Field(None, ge=1)
    """Steps after the warm-up that are averaged; default all."""
    calibration: int = Field(3, ge=0)
    """Steps without synchronisation before the run, which measure bare compute time; 0 skips them."""
    block: int = Field(1, ge=1)
    """Steps of a method's turn in a comparison; more than 1 where a method's transfers go on into the next step."""


class Inject(Section):
    """A deliberate fault: see what a slow rank does to the others, and that `syncline explain` finds it."""

    rank: int | None = Field(None, ge=0)
    """The rank to slow down; default none."""
    phase: Literal["data", "forward", "backward", "update"] = "backward"
    """Phase of the delay."""
    delay_ms: float = Field(0.0, ge=0, le=1e9)
    """How long the rank sleeps in that phase, in milliseconds."""
    every: int = Field(1, ge=1)
    """Delay every so many steps."""
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    """Compute threads of the slow rank; default as many as the others."""


class Profile(Section):
    steps: tuple[NonNegativeInt, ...] = ()
    """Steps, counted from 0, that torch's profiler records; default none."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks to profile."""


class Checkpoint(Section):
    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; default: at the end of each epoch."""


class Plan(Section):
    model: str = "vgg11"
    """A built-in model, or your own as `module:callable`."""
    data: str = "auto"
    """The data set, or your own as `module:callable`."""
    data_dir: str | None = None
    """Folder of the data, or a text file; by default, Syncline searches for CIFAR-10."""
    image_size: int | None = Field(None, ge=8, le=4096)
    """Side in pixels of synthetic images, and of images from files after scaling; default: the model's."""
    num_classes: int | None = Field(None, ge=2, le=10**8)
    """Classes of synthetic images, or tokens of a synthetic vocabulary; default: the model's usual number."""
    sequence_length: int | None = Field(None, ge=2, le=512)
    """Tokens per text; default: the model's usual number."""
    loaders: int | None = Field(None, ge=0, le=256)
    """Processes per worker that prepare batches; 0 prepares them in the worker, the default for data in memory."""
    method: str = CONTROL
    """How gradients are synchronised."""
    options: Options = Options()
    workers: int = Field(2, ge=1, le=MOST_RANKS)
    """Number of ranks; each computes its share of every batch. Default 2, or 1 with method single."""
    hosts: int = Field(1, ge=1, le=MOST_RANKS)
    """Number of hosts; workers spread over them evenly, in rank order. Emulated unless started with --nodes."""
    link: str | None = None
    """Rate of each emulated host's link, such as 1gbit; one for all hosts, or a comma-separated list."""
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    """Compute threads per worker; default cores / workers."""
    global_batch: int = Field(256, ge=1, le=2**31)
    """Samples per step over all workers; default 256, or 8 for texts."""
    accumulate: int = Field(1, ge=1)
    """Split each worker's share of a batch into so many parts; their gradients are added before they travel."""
    batch_norm: BatchNorm | None = None
    """Statistics of each rank's own share (local), the same with rank 0's buffers (broadcast), or of the global batch
    (sync). Default: broadcast for ddp, local for the other methods."""
    steps: int | None = Field(None, ge=1)
    """Steps to train. Give steps or epochs, not both."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training set; default 1."""
    recipe: Literal["default", "course", "fast", "large-batch"] = "default"
    """Optimiser settings by name: what suits the model, a constant rate, one-cycle, or a scaled rate and warm-up; see
    docs/recipes.md."""
    optimizer: Optimizer = Optimizer()
    seed: int = Field(5000, ge=0, lt=2**63)
    """Seed of all randomness: weights, order of samples, augmentation."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model computes."""
    backend: Literal["gloo", "nccl"] | None = None
    """What carries the bytes; default gloo on cpu, nccl on cuda."""
    precision: Precision = "float32"
    """Compute in 32 bits, or multiply 16-bit numbers (bf16) in forward and backward; weights, sums, batch-norm
    statistics and the loss stay in 32 bits."""
    channels_last: bool = True
    """Use the channels-last layout: faster convolutions on CPU."""
    evaluate: bool = True
    """Measure loss and accuracy on the test set after each epoch."""
    eval_per_rank: bool = False
    """Also evaluate with each rank's own batch-norm statistics."""
    test_samples: int | None = Field(None, ge=1)
    """Evaluate only the first so many samples of the test set; default all."""
    compute: str = "real"
    """Compute for real, or sleep for recorded (replay:RUN) or stated (sleep:FILE) times."""
    on_nan: OnNan = "stop"
    """What to do if a rank's loss, gradient or weight is NaN or infinite: stop, warn once and go on, or nothing."""
    check_every: int | None = Field(None, ge=1)
    """Steps between comparisons of all ranks' weights; default: at each checkpoint."""
    log_every: int = Field(20, ge=1)
    """Steps between loss lines."""
    deadline_s: float = Field(120.0, gt=0, le=1e7)
    """Longest wait for other ranks in one operation."""
    max_restarts: int = Field(0, ge=0)
    """How many times a training run restarts from its last checkpoint after ranks failed."""
    measure: Measure = Measure()
    inject: Inject = Inject()
    profile: Profile = Profile()
    checkpoint: Checkpoint = Checkpoint()

    @field_validator("method")
    @classmethod
    def _method_is_known(cls, value: str) -> str:
        value = current_name(value)
        if value not in METHODS:
            raise ValueError(unknown_value(value, METHODS))
        return value

    @field_validator("model")
    @classmethod
    def _model_is_known(cls, value: str) -> str:
        if value not in MODELS and ":" not in value:
            raise ValueError(f"{unknown_value(value, MODELS)} Or give your own as module:callable.")
        return value

    @field_validator("data")
    @classmethod
    def _data_is_known(cls, value: str) -> str:
        if value not in DATA and ":" not in value:
            raise ValueError(f"{unknown_value(value, DATA)} Or give your own as module:callable.")
        return value

    @field_validator("compute")
    @classmethod
    def _compute_is_known(cls, value: str) -> str:
        kind, _, path = value.partition(":")
        if value != "real" and (kind not in ("replay", "sleep") or not path):
            raise ValueError(unknown_value(value, ("real", "replay:RUN", "sleep:FILE")))
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_what_depends(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        filled = {key: value for key, value in given.items() if value is not None}
        if method_of(str(filled.get("method", ""))).world == "worker":
            filled.setdefault("workers", 1)
        if isinstance(filled.get("hosts"), int) and filled["hosts"] > 1:
            filled.setdefault("workers", filled["hosts"])
        if "steps" not in filled:
            filled.setdefault("epochs", 1)
        if reads_texts(filled.get("model"), filled.get("data")) and filled.get("compute", "real") == "real":
            filled.setdefault("global_batch", BATCH_OF_TEXTS)
        optimizer, recipe = filled.get("optimizer", {}), filled.get("recipe", "default")
        if isinstance(optimizer, Mapping) and isinstance(recipe, str) and recipe in RECIPES:
            about = {key: filled.get(key) for key in ("model", "data", "epochs")}
            filled["optimizer"] = with_recipe(optimizer, recipe, **about)
        filled.setdefault("backend", "nccl" if filled.get("device") == "cuda" else "gloo")
        return filled

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs contradict each other: give only one of them.")
        self._method_fits()
        if self.options.transfer_dtype is not None and self.options.collective == "native":
            raise ValueError(
                "options.transfer_dtype does not work with collective native: leave collective out, or use direct."
            )
        if self.options.ahead and self.options.overlap is False:
            raise ValueError("options.ahead sends while backward runs: leave out overlap = false.")
        if self.image_size is not None and self.data == "cifar10":
            raise ValueError("image_size does not apply to data cifar10: its images are 32x32.")
        if self.workers % self.hosts:
            raise ValueError(f"workers {self.workers} cannot be spread evenly over hosts {self.hosts}.")
        if self.link is not None and self.hosts == 1:
            raise ValueError("link is the rate between emulated hosts: give hosts too.")
        if self.accumulate > 1 and self.global_batch < self.workers * self.accumulate:
            raise ValueError(
                f"global_batch {self.global_batch} is smaller than workers {self.workers} x accumulate "
                f"{self.accumulate}: every part needs at least one sample."
            )
        if self.global_batch < self.workers:
            raise ValueError(
                f"global_batch {self.global_batch} is smaller than workers {self.workers}: "
                "every worker needs at least one sample."
            )
        if self.inject.rank is not None and self.inject.rank >= self.workers:
            last = self.workers - 1
            raise ValueError(
                f"inject.rank is {self.inject.rank}, but with {self.workers} workers the last is {last}."
            )
        if self.profile.steps and (beyond := [rank for rank in self.profile.ranks if rank >= self.workers]):
            raise ValueError(
                f"profile.ranks names rank {beyond[0]}, but the last of {self.workers} workers is {self.workers - 1}."
            )
        if self.data in IN_FILES and self.data_dir is None:
            raise ValueError(f"data {self.data} needs data_dir (--data-dir): the folder that holds the images.")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend nccl needs device cuda: choose gloo, or device cuda.")
        self._nothing_is_learnt_in_replay()
        return self

    def _method_fits(self) -> None:
        row = self.method_row
        if row.world == "worker" and self.workers != 1:
            raise ValueError(
                f"method {row.name} runs one worker, but workers is {self.workers}: "
                "set workers to 1 or choose another method."
            )
        for option in self.options.model_dump(exclude_none=True):
            if option not in row.options:
                owners = ", ".join(method.name for method in METHODS.values() if option in method.options)
                raise ValueError(f"method {row.name} has no option {option}; these methods have it: {owners}.")
        if self.hosts > 1 and row.one_host:
            raise ValueError(f"method {row.name} needs all ranks on one host, but hosts is {self.hosts}.")
        if row.world == "mpiexec" and self.max_restarts:
            raise ValueError(
                f"method {row.name} cannot restart its ranks: leave max_restarts out, or choose another method."
            )
        if row.world == "tasks":
            self._tasks_can_do_it(row)
        if row.cpu_only and self.device != "cpu":
            raise ValueError(
                f"method {row.name} averages in the memory of the CPU: choose device cpu, or another method."
            )

    def _tasks_can_do_it(self, row: Method) -> None:
        refused = {
            f"compute {self.compute!r}": self.replayed,
            f"loaders {self.loaders}": bool(self.loaders),
            "inject": self.inject.rank is not None,
            f"batch_norm {self.batch_norm}": self.batch_norm not in (None, "broadcast"),
        }
        for what in (name for name, given in refused.items() if given):
            raise ValueError(
                f"method {row.name} computes in tasks of Spark, which cannot do {what}: leave it out, or choose "
                "another method."
            )

    def _nothing_is_learnt_in_replay(self) -> None:
        if not self.replayed:
            return
        learns = {"checkpoint.every": self.checkpoint.every, "check_every": self.check_every}
        for key, given in {**learns, "eval_per_rank": self.eval_per_rank}.items():
            if given:
                raise ValueError(
                    f"{key} makes no sense with compute {self.compute!r}, which learns nothing: leave it out."
                )
        if self.batch_norm == "sync" or self.accumulate > 1:
            raise ValueError(
                f"compute {self.compute!r} has no parts and no batch norm: leave out accumulate and batch_norm."
            )
        if self.device != "cpu":
            raise ValueError("replayed compute sleeps on the cpu: choose device cpu.")

    @property
    def has_own_data(self) -> bool:
        """The data is a user's own."""
        return ":" in self.data

    @property
    def replayed(self) -> bool:
        """True if ranks sleep instead of computing: loss, accuracy and weights then mean nothing."""
        return self.compute != "real"

    @property
    def compute_note(self) -> str:
        """Shown with every result: 'real', 'replayed from RUN' or 'stated in FILE'."""
        if not self.replayed:
            return self.compute
        kind, path = compute_source(self.compute)
        name = f"{path.parent.name}/{path.name}" if path.name == "compute.json" else path.name
        return f"replayed from {name}" if kind == "replay" else f"stated in {name}"

    @property
    def method_row(self) -> Method:
        return METHODS[self.method]

    @property
    def num_ranks(self) -> int:
        """Processes of the run: one for each worker, or one in all where workers are threads or tasks."""
        return 1 if self.method_row.one_process else self.workers

    def replace(self, **changes: Any) -> Plan:
        """A new, checked plan with some keys changed. Another recipe brings its own optimiser settings."""
        return parse_plan({**self._values_under(changes), **changes})

    def _values_under(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """What these changes leave of the plan: another recipe or optimiser brings settings of its own, and where the
        recipe is the default, so do texts in place of images."""
        values = self.model_dump(exclude_none=True)
        now = {"recipe": self.recipe, "optimizer.name": self.optimizer.name}
        other = any(changes.get(key, value) != value for key, value in now.items())
        then = (changes.get("model", self.model), changes.get("data", self.data))
        if other or (self.recipe == "default" and reads_texts(*then) != reads_texts(self.model, self.data)):
            del values["optimizer"]
        return values

    def threads_of(self, rank: int) -> int:
        """Compute threads of a rank: the same for all but a rank that `inject` slows down."""
        slowed = self.inject.threads if rank == self.inject.rank else None
        return slowed or self.threads or 1

    def options_for(self, method: str) -> dict[str, Any]:
        """The options that apply to this method, for comparisons of several methods under one plan."""
        row = method_of(method)
        if row.world == "threads":
            return {"replicas": self.workers}
        if row.world == "tasks":
            return {"partitions": self.workers, "seed": self.seed}
        given = self.options.model_dump(exclude_none=True)
        return {name: value for name, value in given.items() if name in row.options}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def compute_source(compute: str) -> tuple[str, Path]:
    """'replay:runs/x' -> ('replay', Path('runs/x'))."""
    kind, _, path = compute.partition(":")
    return kind, Path(path).expanduser()


def load_plan(source: Plan | Path | None, overrides: Mapping[str, Any]) -> Plan:
    """A plan, a TOML file's plan, or the defaults, changed by `overrides`; None there means 'not given'."""
    given = {key: value for key, value in overrides.items() if value is not None}
    if isinstance(source, Plan):
        if not given:
            return source
        values = source._values_under(given)
    else:
        values = _read_toml(source) if source is not None else {}
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if length in given and other not in given:
            values.pop(other, None)  # one length that is given replaces the other length
    merged = _merge(values, given)
    if isinstance(merged.get("method"), str):
        merged["method"] = current_name(merged["method"], typed=True)
    return parse_plan(merged)


def stored_plan(path: Path) -> Plan:
    """The plan in a run folder, including those of earlier versions; the first had no recipes, and was `course`."""
    try:
        return parse_plan({"recipe": "course", **_read_toml(path)})
    except PlanError as error:
        message = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise RunFolderError(printable(message), action="The run folder is damaged.") from None


def parse_plan(values: Mapping[str, Any]) -> Plan:
    return checked(Plan, values, "the plan")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path).decode())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"cannot read the plan {path}: it is not text.") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not valid TOML: {error}.") from error


def _merge(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in given.items():
        section, _, inner = key.partition(".")
        current = merged.get(section, {})
        if inner and not isinstance(current, Mapping):
            raise PlanError(f"{section} is a section, not {current!r}.")
        merged[section] = {**current, inner: value} if inner else value
    return merged
