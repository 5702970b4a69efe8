"""What `syncline explain` says about a run, as data: the breakdown of each method, stragglers, advice, a verdict.

`explain(run)` reads the event logs and puts together what the other modules of this package find in them. The result
turns into JSON as it is (`as_document`); reports draw it.
"""

from __future__ import annotations

import statistics
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
from syncline.accounting.doubts import Timed, doubted
from syncline.accounting.outliers import Outliers, find_outliers
from syncline.accounting.pieces import pieces
from syncline.accounting.ranking import rank_times, sentence
from syncline.accounting.selection import look_at
from syncline.accounting.stragglers import Disagreement, Straggler, find_disagreement, find_stragglers
from syncline.accounting.usage import Profiled, RankMemory, memory, operator_totals
from syncline.errors import RunFolderError, SynclineError
from syncline.events import NO_STEPS, Events, Step, Steps
from syncline.machine import BF16_RATES
from syncline.methods import current_label, current_name, method_of
from syncline.plan import Plan
from syncline.remote import shown
from syncline.results import Tabular
from syncline.spans import Record
from syncline.store import Run
from syncline.units import format_seconds

PREDICTED = ("step_s", "ahead_s", "barrier_s", "bound_s")


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
    predicted: dict[str, Any] | None = None
    """What the method expected of a step when it had planned its transfers, and what later steps took."""


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
            f"the event logs of {shown(run.path)} hold no step that every rank finished"
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
    times = _side_by_side(run, methods)
    said = methods[0].verdict if len(methods) == 1 else _comparison(methods, times)
    return Explanation(
        run=shown(run.path),
        kind=run.kind,
        status=run.status,
        model=plan.model,
        workers=plan.workers if plan.method_row.one_process else events.world_size,
        hosts=hosts,
        compute=plan.compute_note,
        injected=_is_slowed(plan),
        warmup=plan.measure.warmup,
        methods=methods,
        verdict=_doubted(said, run, times),
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
            f"{shown(run.path)} has several methods.", action=f"Choose one with --method: {', '.join(names)}."
        )
    steps = events.steps[names[0]] if names else NO_STEPS
    numbers = steps.numbers.tolist()
    if number not in numbers:
        there = f"{min(numbers)} to {max(numbers)}" if numbers else "none"
        raise RunFolderError(
            f"{shown(run.path)} has no finished step {number}.", action=f"Steps in the log: {there}."
        )
    return _explain_step(run, names[0], steps[numbers.index(number)], events)


def counted_steps(events: Events, method: str, warmup: int) -> Steps:
    """The finished steps after the first `warmup` of each session; all of them if none would be left."""
    steps = events.complete(method)
    sessions = steps.sessions.tolist()
    first = {session: place for place, session in reversed(list(enumerate(sessions)))}
    counted = [place for place, session in enumerate(sessions) if place >= first[session] + warmup]
    return steps.chosen(counted) if counted else steps


def _chosen(events: Events, method: str | None, run: Run) -> list[str]:
    names = [name for name, steps in events.steps.items() if len(steps)]
    method = method and current_name(method, typed=True)
    if method is None or method in names:
        return names if method is None else [method]
    raise RunFolderError(
        f"{shown(run.path)} has no steps of method {method!r}.", action=f"It has: {', '.join(names) or 'none'}."
    )


def _explain_method(
    name: str,
    events: Events,
    plan: Plan,
    machine: _Machine,
    notes: list[str],
    link: tuple[float, str] | None,
) -> MethodExplanation | None:
    counted = counted_steps(events, name, plan.measure.warmup)
    if not len(counted):
        return None
    looked = look_at(counted)
    steps, every = looked.steps, looked.breakdowns
    loaders = [record for _, record in events.of_kind("loader") if record.get("method", "") == name]
    usual = looked.usual
    breakdowns = [every[index] for index in usual]
    outliers = find_outliers(
        looked.slow, breakdowns, _loader_starts(loaders), counted=len(counted), usual_s=looked.usual_s
    )
    breakdown = summarise([steps[index] for index in usual], breakdowns)
    assert breakdown is not None, "outliers are rare"
    if looked.note:
        notes.append(looked.note)
    if plan.measure.warmup and len(counted) == len(events.complete(name)):
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
        predicted=_predicted(name, events, counted),
    )  # fmt: skip


def _predicted(name: str, events: Events, steps: Steps) -> dict[str, Any] | None:
    """The last word of the lowest rank; all ranks plan alike."""
    said = [record for _, record in events.of_kind("prediction") if record.get("method", "") == name]
    said = [record for record in said if all(isinstance(record.get(key), float) for key in PREDICTED)]
    if not said:
        return None
    last = max(said, key=lambda record: (record["session"], record["step"]))
    is_same = (steps.sessions == last["session"]) & (steps.numbers > last["step"])
    measured = (steps.longest[is_same | (steps.sessions > last["session"])] / 1e9).tolist()
    measured_s = statistics.median(measured) if measured else None
    return {**{key: last[key] for key in PREDICTED}, "waits": bool(last.get("waits")), "measured_s": measured_s}


def _loader_starts(records: Sequence[Record]) -> set[int]:
    """Steps in which a data loader started workers on some rank, and the next: each worker's first batch."""
    return {int(record["step"]) + later for record in records for later in range(int(record.get("started", 0)))}


def _compute_times(breakdowns: Sequence[Mapping[int, RankBreakdown]]) -> dict[int, dict[str, list[float]]]:
    return {
        rank: {part: [by_rank[rank].parts[part] / 1e9 for by_rank in breakdowns] for part in COMPUTE}
        for rank in breakdowns[0]
    }


def _comparison(methods: Sequence[MethodExplanation], times: Mapping[str, Sequence[float]]) -> str:
    """Which method is fastest and where its lead over the slowest lies; 'no difference' where there is none."""
    by_name = {method.method: method for method in methods if method_of(method.method).world != "worker"}
    if len(by_name) < 2:
        return " ".join(method.verdict for method in methods)
    if not all(times.get(name) for name in by_name):
        return "The methods have no step in common."
    ranking = rank_times({name: times[name] for name in by_name})
    text, first = sentence(ranking), by_name[ranking.fastest[0]]
    if ranking.slower:
        slowest = by_name[ranking.slower[-1][0]]
        apart = {part: slow - first.breakdown.parts_s[part] for part, slow in slowest.breakdown.parts_s.items()}
        part = max(apart, key=lambda part: apart[part])
        text += f"; the largest part of that is {part}, {format_seconds(apart[part])} more"
    return f"{text}. {first.verdict}"


def _side_by_side(run: Run, methods: Sequence[MethodExplanation]) -> dict[str, list[float]]:
    """Step times of the slowest rank by method, in the same order for all: as the comparison noted them where it came
    to its end, since a turn of several steps is not its steps added up; otherwise the steps in all methods' logs."""
    noted = {current_label(row["label"]): row["seconds"] for row in run.summary.get("rows", ()) if "label" in row}
    names = [method.method for method in methods]
    if run.kind == "compare" and all(name in noted for name in names):
        return {name: list(noted[name]) for name in names}
    times = {name: _times(run.events, name, run.plan.measure.warmup) for name in names}
    shared = sorted(set.intersection(*(set(own) for own in times.values())))
    return {name: [own[number] / 1e9 for number in shared] for name, own in times.items()}


def _doubted(text: str, run: Run, times: Mapping[str, Sequence[float]]) -> str:
    """With what is doubtful about the run's times in front. Where the time of one method went is not refused."""
    if run.kind == "record" or _is_slowed(run.plan):
        return text  # another's loop is what it is; and an experiment with a slowed rank says so itself
    summary = run.summary
    loads = [row.get("other_load") for row in (summary, *summary.get("rows", ()))]
    figures = {"other_load": max((load for load in loads if load is not None), default=None)}
    marks = tuple(run.marks) if summary else ()
    timed = [Timed(seconds, figures, marks) for seconds in times.values()]
    return doubted(text, timed, refuses=len(times) > 1)


def _times(events: Events, method: str, warmup: int) -> dict[int, int]:
    """Of the slowest rank, by step."""
    steps = counted_steps(events, method, warmup)
    return dict(zip(steps.numbers.tolist(), steps.longest.tolist(), strict=True))


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
    plan, names = run.plan, [name for name in found.get("bf16") or () if name in BF16_RATES] or [None]
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
    return StepExplanation(shown(run.path), method, step.number, ranks, missing, events.problems)


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
