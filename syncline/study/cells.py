"""Cells: every run of a stage, as plans. Pure, so that what a study would do can be said before it does it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.errors import PlanError
from syncline.machine import cores
from syncline.methods import BASELINE, OLD_NAMES, method_of
from syncline.plan import Plan, load_plan
from syncline.study.file import Stage, Study
from syncline.study.lab_code import call_identity
from syncline.study.plan_keys import VIRTUAL

ADDED: dict[str, Any] = {
    "precision": "float32",
    "test_samples": None,
    "on_nan": "stop",
    "check_every": None,
    "options": dict(chunk_mb=None, order=None, barrier=None, ahead=None, strict=None),  # noqa: C408  (no method is named here)
    "measure": {"block": 1},
    "optimizer": {"name": "sgd", "betas": None, "eps": None, "clip_norm": None},
}
"""Plan keys that came after the first labs, with what every plan meant before: those leave a digest as it was."""


@dataclass(frozen=True)
class Ground:
    """Where the study runs: on this machine's workers, or on emulated hosts joined by a link."""

    hosts: int | None = None
    link: str | None = None
    cores: int = field(default_factory=cores)
    note: str = ""
    """Why nodes are not the emulated hosts that the study asks for."""


@dataclass(frozen=True)
class Cell:
    """One run: what is run, where in the grid it stands, and a name that stays the same while the study does."""

    stage: str
    run: str
    plan: Plan
    methods: tuple[str, ...]
    point: Mapping[str, Any]
    round: int
    call: str | None = None
    replays: bool = False
    """Compute will be slept, also where it is not recorded yet."""
    why_not: str | None = None
    """Why it cannot run: an earlier stage did not give what it needs."""

    @property
    def name(self) -> str:
        words = [self.stage, *(f"{key}={_word(value)}" for key, value in self.point.items()), f"round={self.round}"]
        return f"{'-'.join(words).replace('/', '_')}-{self.digest[:8]}"

    def folder_in(self, cells: Path) -> Path:
        """Its run folder, which may be of a version that knew a method under another name."""
        before = self._with_old_names()
        folders = [cells / self.name, *([cells / before.name] if before is not None else [])]
        return next((folder for folder in folders if folder.exists()), folders[0])

    def _with_old_names(self) -> Cell | None:
        old = {today: name for name, today in OLD_NAMES.items()}
        if not old.keys() & {self.plan.method, *self.methods, self.point.get("method")}:
            return None
        point = {key: old.get(value, value) if key == "method" else value for key, value in self.point.items()}
        plan = self.plan.model_copy(update={"method": old.get(self.plan.method, self.plan.method)})
        return replace(self, plan=plan, methods=tuple(old.get(name, name) for name in self.methods), point=point)

    @property
    def digest(self) -> str:
        """Changes with anything that changes the result, so that no other cell is mistaken for this one."""
        plan = {**_known_before(self.plan), "compute": self.plan.compute_note}  # wherever the folder lies
        call = call_identity(self.call) if self.call else None
        parts = [self.run, call, list(self.methods), plan, self.round]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


Chosen = Mapping[tuple[Any, ...], Mapping[str, Any]]
"""What an earlier stage found best: for each choice of `each` values, the values of its keys."""


Recorded = Mapping[tuple[str, int], str]
"""Run folders with recorded compute, by model and batch per worker."""


def expand(
    study: Study,
    stage: Stage,
    ground: Ground,
    *,
    quick: bool,
    best: Chosen | None = None,
    recorded: Recorded | None = None,
) -> list[Cell]:
    """The cells of a stage, round by round.

    `best` is what `best_of` found; without it, the first of that grid. `recorded` is what `replay` found; without it,
    compute is real.
    """
    grid = {**stage.grid, **(stage.quick.grid if quick else {})}
    methods = tuple((stage.quick.methods if quick else None) or stage.methods)
    rounds = (stage.quick.rounds if quick else None) or stage.rounds
    given = merged(study.plan, study.quick if quick else {}, stage.plan, stage.quick.plan if quick else {})
    first = _placeholder(study, stage, quick=quick)
    best = first if best is None else best
    variants = (stage.quick.variants if quick else {}) or stage.variants
    ground = replace(ground, hosts=None, link=None) if stage.loopback else ground
    cells = []
    for number in range(rounds):
        for variant, *chosen in itertools.product(variants or [None], *grid.values()):
            point = dict(zip(grid, chosen, strict=True))
            inherited, why = _inherited(stage, point, best, first)
            values = {**given, **(variants[variant] if variant else {}), **inherited, **point}
            why = why or _no_link(values, ground)
            if ground.hosts is not None and values.get("nodes", 1) > ground.hosts:
                continue
            if stage.threads_per_core is not None and _threads(values) > stage.threads_per_core * ground.cores:
                continue
            place = {**({"variant": variant} if variant else {}), **inherited, **point}
            made = _cells(stage, values, place, methods, number + 1, ground)
            cells += [replace(cell, replays=stage.replay is not None, why_not=why or cell.why_not) for cell in made]
    if stage.replay is None or recorded is None:
        return cells
    return [_replayed(stage, cell, recorded) for cell in cells]


def most_nodes(study: Study, *, quick: bool) -> int:
    """The largest number of nodes that any stage has; 1 where none has several."""
    nodes = [1]
    for stage in study.stage:
        grid = {**stage.grid, **(stage.quick.grid if quick else {})}
        given = merged(study.plan, study.quick if quick else {}, stage.plan, stage.quick.plan if quick else {})
        nodes += grid.get("nodes", [given.get("nodes", 1)])
    return max(nodes)


def _replayed(stage: Stage, cell: Cell, recorded: Recorded) -> Cell:
    why = unrecorded(stage, cell, recorded)
    if why is not None:
        return replace(cell, why_not=cell.why_not or why)
    return replace(cell, plan=cell.plan.replace(compute=f"replay:{recorded[share_of(cell)]}"))


def unrecorded(stage: Stage, cell: Cell, recorded: Collection[tuple[str, int]]) -> str | None:
    """Why there is nothing to replay; None if this model was recorded at this share of the batch."""
    model, samples = share_of(cell)
    if (model, samples) in recorded:
        return None
    known = ", ".join(str(batch) for name, batch in recorded if name == model) or "none"
    return f"stage {stage.replay} recorded no {model} at {samples} samples per worker (recorded: {known})"


def share_of(cell: Cell) -> tuple[str, int]:
    """What one worker computes: the model and its samples of a step."""
    return cell.plan.model, cell.plan.global_batch // cell.plan.workers


def _no_link(values: Mapping[str, Any], ground: Ground) -> str | None:
    """Why nodes cannot have the link that a stage asks for: they are processes of this machine."""
    if "link" not in values or values.get("nodes", 1) == 1 or ground.hosts is not None:
        return None
    return f"link {values['link']} needs emulated hosts, and nodes are processes of this machine here"


def _threads(values: Mapping[str, Any]) -> int:
    """Compute threads on one node."""
    workers = values.get("workers_per_node", 1) if "nodes" in values else values.get("workers", 1)
    return int(workers * values.get("threads", 1))


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; a length in steps replaces one in epochs, and the other way round."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, replaced in (("steps", "epochs"), ("epochs", "steps")):
            if key in layer and replaced not in layer:
                merged.pop(replaced, None)
        merged |= layer
    return merged


def _cells(
    stage: Stage, values: dict[str, Any], point: dict[str, Any], methods: Sequence[str], number: int, ground: Ground
) -> list[Cell]:
    """Methods take turns in one comparison; trainings have one cell each. On several hosts, so have methods that
    cannot run there, with the reason."""
    grows = [key for key in ("batch_per_worker", "batch_per_node") if key in values]
    point = {**point, **{key: values[key] for key in grows}}
    left_out: list[Cell] = []
    if ground.hosts is not None and values.get("nodes", 1) > 1:
        for method in (name for name in methods if method_of(name).one_host):
            plan = _plan(stage, {**values, "nodes": 1, "method": method}, ground)
            cell = Cell(stage.name, stage.run, plan, (), {**point, "method": method}, number, stage.call)
            left_out.append(replace(cell, why_not=f"method {method} runs on one host only"))
        if left_out and len(left_out) == len(methods):
            return left_out
        methods = [name for name in methods if not method_of(name).one_host]
    if stage.run in ("compare", "verify"):
        nodes = values.get("nodes", values.get("workers", 1))
        if stage.alone and nodes * values.get("workers_per_node", 1) == 1:
            methods = [name for name in methods if name in stage.alone]
        if (grows and nodes > 1) or (stage.replay and nodes * values.get("workers_per_node", 1) > 1):
            # In weak scaling the baseline has one worker's batch, which only the smallest cell has; and recorded
            # times are those of one worker's share.
            methods = [name for name in methods if method_of(name).world != "worker"]
        first = next((name for name in methods if method_of(name).world != "worker"), BASELINE)
        plan = _plan(stage, {**values, "method": values.get("method", first)}, ground)
        return [Cell(stage.name, stage.run, plan, tuple(methods), point, number), *left_out]
    cells = []
    names: Sequence[str | None] = [*methods] or [None]
    for name in names:
        here = point if name is None else {**point, "method": name}
        plan = _plan(stage, values if name is None else {**values, "method": name}, ground)
        cells.append(Cell(stage.name, stage.run, plan, (), here, number, stage.call))
    return [*cells, *left_out]


def _plan(stage: Stage, values: Mapping[str, Any], ground: Ground) -> Plan:
    keys = {key: value for key, value in values.items() if key not in VIRTUAL}
    if "nodes" in values:
        # One node is one worker: with nothing to send, the network does not matter.
        emulated = ground.hosts is not None and values["nodes"] > 1
        link = keys.pop("link", ground.link)  # a stage may have, or vary, a link of its own
        keys |= {"hosts": values["nodes"], "link": link} if emulated else {}
        keys["workers"] = values["nodes"] * values.get("workers_per_node", 1)
    if method_of(keys.get("method", "")).world == "worker":
        keys["workers"] = 1
        keys.pop("hosts", None)
        keys.pop("link", None)
    if "batch_per_worker" in values:
        keys["global_batch"] = values["batch_per_worker"] * keys.get("workers", 1) * keys.get("accumulate", 1)
    if "batch_per_node" in values:
        keys["global_batch"] = values["batch_per_node"] * values.get("nodes", 1)
    try:
        return load_plan(None, keys)
    except PlanError as error:
        raise PlanError(f"stage {stage.name}: {error.message}", action=error.action) from None


def _inherited(
    stage: Stage, point: Mapping[str, Any], best: Chosen, first: Chosen
) -> tuple[Mapping[str, Any], str | None]:
    """What the earlier stage found best; if it measured nothing, the first of its grid, and why that cannot run."""
    if stage.best_of is None:
        return {}, None
    group = tuple(point[key] for key in stage.best_of.each)
    if group in best:
        return best[group], None
    who = f" for {', '.join(map(str, group))}" if group else ""
    return first[group], f"stage {stage.best_of.stage} measured nothing{who}, so it has no best values"


def _placeholder(study: Study, stage: Stage, *, quick: bool) -> Chosen:
    """Before the earlier stage has run: the first value of each key, for estimates and for checking the file."""
    if stage.best_of is None:
        return {}
    earlier = next(candidate for candidate in study.stage if candidate.name == stage.best_of.stage)
    grid = {**earlier.grid, **(earlier.quick.grid if quick else {})}
    own = {**stage.grid, **(stage.quick.grid if quick else {})}
    for key in (*stage.best_of.keys, *stage.best_of.each):
        if key not in grid and not (earlier.best_of and key in earlier.best_of.keys):
            raise PlanError(f"stage {stage.name}: best_of asks for {key}, which stage {earlier.name} does not vary.")
    inherited = _placeholder(study, earlier, quick=quick) if earlier.best_of else {}
    first = next(iter(inherited.values()), {})
    values = {key: grid[key][0] if key in grid else first[key] for key in stage.best_of.keys}
    return dict.fromkeys(itertools.product(*(own[key] for key in stage.best_of.each)), values)


def _known_before(plan: Plan) -> dict[str, Any]:
    """The plan's keys, but for ADDED ones that say what older versions did anyway."""
    values: dict[str, Any] = plan.model_dump(mode="json")
    return _without(values, ADDED)


def _without(values: dict[str, Any], meant: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in meant or value != meant[key]}
    inner = {key: value for key, value in kept.items() if isinstance(meant.get(key), Mapping)}
    return kept | {key: _without(value, meant[key]) for key, value in inner.items()}


def _word(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value).replace(" ", "")
