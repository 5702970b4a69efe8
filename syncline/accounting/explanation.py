"""What `syncline explain` says about a run, as data: the breakdown of each method, stragglers, advice, a verdict.

`explain(run)` reads the event logs and puts together what the other modules of this package find in them. The result
turns into JSON as it is (`as_document`); reports draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from syncline.accounting.advice import Advice, Facts, advise, verdict
from syncline.accounting.bandwidth import Bandwidth, bandwidth, find_link
from syncline.accounting.breakdown import (
    COMPUTE,
    Breakdown,
    RankBreakdown,
    break_down,
    buckets_of,
    last_to_be_ready,
    offered,
    summarise,
)
from syncline.accounting.contention import Contention, bare_times, contention
from syncline.accounting.outliers import Outliers, find_outliers, is_outlier
from syncline.accounting.pieces import pieces
from syncline.accounting.statistics import paired_ratio
from syncline.accounting.stragglers import Disagreement, Straggler, find_disagreement, find_stragglers
from syncline.accounting.usage import Profiled, RankMemory, memory, operator_totals
from syncline.errors import RunFolderError, SynclineError
from syncline.events import Events, Step
from syncline.methods import current_name, method_of
from syncline.plan import Plan
from syncline.results import Tabular
from syncline.spans import Record
from syncline.store import Run
from syncline.units import format_seconds


@dataclass(frozen=True)
class MethodExplanation:
    """One method of a run; a training run has one."""

    method: str
    breakdown: Breakdown
    stragglers: list[Straggler]
    disagreement: Disagreement | None
    advice: list[Advice]
    verdict: str
    contention: Contention | None = None
    bandwidth: Bandwidth | None = None
    """Bytes from theory and as counted, and rates by bucket."""
    memory: list[RankMemory] = field(default_factory=list)
    """By rank; empty where the log holds none."""
    outliers: list[Outliers] = field(default_factory=list)
    """Steps that took far longer than the others. The breakdown and the advice are of the others."""


@dataclass(frozen=True)
class Clock:
    """How a rank's clock was set to rank 0's."""

    rank: int
    source: str
    offset_s: float
    interval_s: float


@dataclass(frozen=True, repr=False)
class Explanation(Tabular):
    run: str
    kind: str
    status: str
    model: str
    workers: int
    hosts: int
    compute: str
    """real, or where the compute times were taken from."""
    injected: bool
    """A rank was slowed down on purpose."""
    warmup: int
    methods: list[MethodExplanation]
    verdict: str
    notes: list[str]
    """What must be known to read the figures: injected delays, clocks of several hosts, all steps warm-up."""
    problems: list[str]
    """What is wrong with the logs."""
    clocks: list[Clock] = field(default_factory=list)
    profile: Profiled | None = None
    """Operator totals, where torch's profiler recorded some steps."""

    @property
    def advice(self) -> list[Advice]:
        """What would help, for all methods together; the largest gain first."""
        every = [advice for method in self.methods for advice in method.advice]
        return sorted(every, key=lambda advice: -(advice.saves_s or 0.0))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each method: the mean step, and its parts, which add up to it."""
        return [
            {"method": method.method, "step_s": method.breakdown.step_s, **_in_seconds(method.breakdown.parts_s),
             "hidden_s": method.breakdown.hidden_s, "overlap": method.breakdown.overlap}
            for method in self.methods
        ]  # fmt: skip

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BucketOnRank:
    """Seconds from the start of the step on the first rank."""

    label: str
    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float
    ready_everywhere_s: float
    last_rank: int
    """The rank that was ready last."""
    wire_s: float
    """Exposed."""
    wait_s: float


@dataclass(frozen=True)
class RankOfStep:
    rank: int
    start_s: float
    step_s: float
    parts_s: dict[str, float]
    hidden_s: float
    last_ready_s: float
    buckets: list[BucketOnRank]


@dataclass(frozen=True)
class StepExplanation:
    run: str
    method: str
    step: int
    ranks: list[RankOfStep]
    missing: list[int]
    """Ranks whose log does not have this step."""
    problems: list[str]

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def _in_seconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}_s": seconds for part, seconds in parts.items()}


def explain(run: Run, *, method: str | None = None, probe: Run | None = None) -> Explanation:
    """The whole run, or one method of it. Without a probe, the newest that fits gives the rate of the link."""
    events, plan, notes = run.events, run.plan, _notes(run.plan)
    backend = "mpi" if plan.method_row.world == "mpiexec" else plan.backend or "gloo"
    link = find_link(run, backend=backend, probe=probe)
    methods = [
        explained
        for name in _chosen(events, method, run)
        if (explained := _explain_method(name, events, plan, _machine(run), notes, link)) is not None
    ]
    if not methods:
        raise RunFolderError(
            f"the event logs of {run.path} hold no step that every rank finished"
            + (f": {'; '.join(events.problems)}." if events.problems else "."),
            action="Run it for longer.",
        )
    if run.status in ("failed", "stopped"):
        notes.append(f"The run {run.status}; this shows what it did until then.")
    hosts = len({info.host for info in events.ranks.values()})
    clocks = [
        Clock(rank, alignment.source, alignment.offset_ns / 1e9, alignment.interval_ns / 1e9)
        for rank, alignment in sorted(events.alignments.items())
    ]
    notes += _clock_note(clocks, hosts)
    return Explanation(
        run=str(run.path),
        kind=run.kind,
        status=run.status,
        model=plan.model,
        workers=events.world_size,
        hosts=hosts,
        compute=plan.compute_note,
        injected=_is_slowed(plan),
        warmup=plan.measure.warmup,
        methods=methods,
        verdict=methods[0].verdict if len(methods) == 1 else _comparison(methods, events, plan),
        notes=notes,
        problems=events.problems,
        clocks=clocks,
        profile=operator_totals(run.path),
    )


def explain_step(run: Run, number: int, *, method: str | None = None) -> StepExplanation:
    """One step, rank by rank and bucket by bucket; also where some rank did not finish it."""
    events = run.events
    names = _chosen(events, method, run)
    if len(names) > 1:
        raise RunFolderError(
            f"{run.path} has several methods.", action=f"Choose one with --method: {', '.join(names)}."
        )
    steps = {step.number: step for step in events.steps.get(names[0], [])}
    if number not in steps:
        there = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise RunFolderError(f"{run.path} has no finished step {number}.", action=f"Steps in the log: {there}.")
    return _explain_step(run, names[0], steps[number], events)


def counted_steps(events: Events, method: str, warmup: int) -> list[Step]:
    """The finished steps after the first `warmup` of each session; all of them if none would be left."""
    steps = events.complete(method)
    first = {step.session: number for number, step in reversed(list(enumerate(steps)))}
    counted = [step for number, step in enumerate(steps) if number >= first[step.session] + warmup]
    return counted or steps


def _chosen(events: Events, method: str | None, run: Run) -> list[str]:
    names = [name for name, steps in events.steps.items() if steps]
    method = method and current_name(method, typed=True)
    if method is None or method in names:
        return names if method is None else [method]
    raise RunFolderError(
        f"{run.path} has no steps of method {method!r}.", action=f"It has: {', '.join(names) or 'none'}."
    )


def _explain_method(
    name: str,
    events: Events,
    plan: Plan,
    machine: _Machine,
    notes: list[str],
    link: tuple[float, str] | None,
) -> MethodExplanation | None:
    steps = counted_steps(events, name, plan.measure.warmup)
    every = [break_down(step) for step in steps]
    if not every:
        return None
    loaders = [record for _, record in events.of_kind("loader") if record.get("method", "") == name]
    outliers = find_outliers(steps, every, _loader_starts(loaders))
    usual = [index for index, is_out in enumerate(is_outlier(every)) if not is_out]
    breakdowns = [every[index] for index in usual]
    breakdown = summarise([steps[index] for index in usual], breakdowns)
    assert breakdown is not None, "outliers are rare"
    if plan.measure.warmup and len(steps) == len(events.complete(name)):
        notes.append(f"All steps of {name} are warm-up steps; they are counted anyway.")
    stragglers = find_stragglers(steps, every, events.ranks)
    disagreement = find_disagreement(breakdowns)
    facts = Facts(
        method=method_of(name).name,
        breakdown=breakdown,
        stragglers=stragglers,
        disagreement=disagreement,
        hosts=len({events.ranks[rank].host for rank in steps[0].ranks if rank in events.ranks}),
        cores=machine.cores,
        threads={rank: events.ranks[rank].threads or 1 for rank in steps[0].ranks if rank in events.ranks},
        options=plan.options_for(name),
        outliers=outliers,
        loader_workers=max((int(record.get("workers", 0)) for record in loaders), default=0),
        bf16=machine.bf16,
    )
    advice = advise(facts)
    # Calibration steps know no injected delay, and replayed compute cannot be slowed.
    is_comparable = plan.compute_note == "real" and not _is_slowed(plan)
    slowed = contention(bare_times(events), _compute_times(breakdowns)) if is_comparable else None
    return MethodExplanation(
        name, breakdown, stragglers, disagreement, advice, verdict(facts, advice), contention=slowed,
        bandwidth=bandwidth(events, name, plan, steps, link=link), memory=memory(events, name), outliers=outliers,
    )  # fmt: skip


def _loader_starts(records: Sequence[Record]) -> set[int]:
    """Steps in which a data loader started workers on some rank, and the next: each worker's first batch."""
    return {int(record["step"]) + later for record in records for later in range(int(record.get("started", 0)))}


def _compute_times(breakdowns: Sequence[Mapping[int, RankBreakdown]]) -> dict[int, dict[str, list[float]]]:
    return {
        rank: {part: [by_rank[rank].parts[part] / 1e9 for by_rank in breakdowns] for part in COMPUTE}
        for rank in breakdowns[0]
    }


def _comparison(methods: Sequence[MethodExplanation], events: Events, plan: Plan) -> str:
    """Which method is quickest and where its lead over the slowest lies; 'no difference' where there is none."""
    many = [method for method in methods if method_of(method.method).world != "worker"]
    if len(many) < 2:
        return " ".join(method.verdict for method in methods)
    quickest = min(many, key=lambda method: method.breakdown.median_s)
    slowest = max(many, key=lambda method: method.breakdown.median_s)
    times = {row.method: _times(events, row.method, plan.measure.warmup) for row in (quickest, slowest)}
    shared = sorted(times[quickest.method].keys() & times[slowest.method].keys())
    none = f"These {len(shared)} steps show no difference between the methods. {quickest.verdict}"
    if len(shared) < 2:
        return none
    ratio = paired_ratio(*([times[row.method][number] for number in shared] for row in (slowest, quickest)))
    if ratio.no_difference or ratio.median < 1:
        return none
    apart = {part: slow_s - quickest.breakdown.parts_s[part] for part, slow_s in slowest.breakdown.parts_s.items()}
    part = max(apart, key=lambda part: apart[part])
    return (
        f"{quickest.method} is quickest, {slowest.method} slowest, {ratio.median:.2f} times as long "
        f"step by step; the largest part of that is {part}, {format_seconds(apart[part])} more. {quickest.verdict}"
    )


def _times(events: Events, method: str, warmup: int) -> dict[int, int]:
    """Of the slowest rank, by step."""
    return {
        step.number: max(rank_step.duration for rank_step in step.ranks.values())
        for step in counted_steps(events, method, warmup)
    }


def _notes(plan: Plan) -> list[str]:
    notes = []
    if plan.compute_note != "real":
        notes.append(f"Compute times are {plan.compute_note}: only communication is real.")
    if _is_slowed(plan):
        threads = f", {plan.inject.threads} threads" if plan.inject.threads else ""
        delay = f", {plan.inject.delay_ms:g} ms in {plan.inject.phase}" if plan.inject.delay_ms else ""
        notes.append(f"The plan slows rank {plan.inject.rank} down on purpose{delay}{threads}.")
    return notes


def _is_slowed(plan: Plan) -> bool:
    return plan.inject.rank is not None and bool(plan.inject.delay_ms or plan.inject.threads)


def _clock_note(clocks: Sequence[Clock], hosts: int) -> list[str]:
    pinged = [clock for clock in clocks if clock.source == "ping"]
    if pinged:
        widest = max(clock.interval_s for clock in pinged)
        return [f"Pings compared the clocks of {hosts} hosts to within ±{format_seconds(widest)}."]
    if hosts > 1 and all(clock.source == "same clock" for clock in clocks):
        return [f"The {hosts} hosts are emulated on one machine and share its clock."]
    return []


@dataclass(frozen=True)
class _Machine:
    """What advice depends on, as far as the run folder says it."""

    cores: int | None = None
    bf16: str | None = None
    """An instruction that a run in 32 bits left unused. None for another's loop, whose precision is not known."""


def _machine(run: Run) -> _Machine:
    try:
        found = run.machine
    except SynclineError:
        return _Machine()
    plan, names = run.plan, found.get("bf16") or [None]
    unused = plan.precision == "float32" and plan.device == "cpu" and not plan.replayed and run.kind != "record"
    return _Machine(int(found["cores"]) if found.get("cores") else None, names[0] if unused else None)


def _explain_step(run: Run, method: str, step: Step, events: Events) -> StepExplanation:
    breakdowns = break_down(step)
    zero = min(rank_step.start for rank_step in step.ranks.values())
    averages = [(piece, break_down(piece)) for piece in pieces(step)]
    ranks = []
    for rank, rank_step in step.ranks.items():
        rows = [row for piece, own in averages for row in _bucket_rows(piece, own[rank], zero)]
        ranks.append(
            RankOfStep(
                rank=rank,
                start_s=(rank_step.start - zero) / 1e9,
                step_s=rank_step.duration / 1e9,
                parts_s={part: duration / 1e9 for part, duration in breakdowns[rank].parts.items()},
                hidden_s=breakdowns[rank].hidden / 1e9,
                last_ready_s=(breakdowns[rank].last_ready - zero) / 1e9,
                buckets=rows,
            )
        )
    missing = [rank for rank in events.taking_part(method) if rank not in step.ranks]
    return StepExplanation(str(run.path), method, step.number, ranks, missing, events.problems)


def _bucket_rows(step: Step, own: RankBreakdown, zero: int) -> list[BucketOnRank]:
    sendable, rows = offered(step), []
    for label, bucket in buckets_of(step.ranks[own.rank]).items():
        everywhere, last = last_to_be_ready(label, sendable)
        rows.append(
            BucketOnRank(
                label=label,
                num_bytes=bucket.num_bytes,
                ready_s=(bucket.ready - zero) / 1e9,
                start_s=(bucket.start - zero) / 1e9,
                end_s=(bucket.end - zero) / 1e9,
                ready_everywhere_s=(everywhere - zero) / 1e9,
                last_rank=last,
                wire_s=own.wire.get(label, 0) / 1e9,
                wait_s=sum(wait.duration for wait in own.waits if wait.bucket == label) / 1e9,
            )
        )
    return rows
