"""What to do about a step: rules with thresholds, each with the most that it could save, computed from the log.

A rule looks at the facts of one method and returns one piece of advice or none. Savings are upper bounds: what is
named is gone and nothing else grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.accounting.breakdown import COMPUTE, Breakdown, BucketMeans
from syncline.accounting.outliers import Outliers
from syncline.accounting.stragglers import BETWEEN, Disagreement, Straggler
from syncline.machine import BF16_RATES
from syncline.methods import IN_MEMORY, ON_LINKS, Method, method_of
from syncline.units import format_seconds

MOSTLY_COMPUTE = 0.9
MUCH_WIRE = 0.25
HALF = 0.5
SOME = 0.1
MUCH_DATA = 0.15
MUCH_UPDATE = 0.2
UNEXPLAINED = 0.05
LITTLE_OVERLAP = 0.1
FEW_BUCKETS = 0.8
"""Of the exposed wire: the buckets that are named."""
MOST_NAMED = 5
"""Steps that are named."""
MOST = 3
"""Pieces of advice in the verdict."""


@dataclass(frozen=True)
class Facts:
    """What is known about one method in one run."""

    method: str
    """As the plan names it, without what a comparison adds."""
    breakdown: Breakdown
    stragglers: Sequence[Straggler] = ()
    disagreement: Disagreement | None = None
    hosts: int = 1
    cores: int | None = None
    """Of one host."""
    threads: Mapping[int, int] = field(default_factory=dict)
    """Compute threads by rank, as far as known."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, as the plan gives them."""
    outliers: Sequence[Outliers] = ()
    """Steps that the breakdown leaves out."""
    loader_workers: int = 0
    """Processes of a rank that load data ahead, as far as known."""
    bf16: str | None = None
    """The processor's fastest bf16 instruction, where the run could have used it and did not."""

    @property
    def row(self) -> Method:
        return method_of(self.method)

    @property
    def workers(self) -> int:
        return len(self.breakdown.ranks)

    @property
    def late_s(self) -> float:
        """Waiting that a named straggler explains."""
        return sum(straggler.waited_s for straggler in self.stragglers) * (self.workers - 1) / self.workers


@dataclass(frozen=True)
class Advice:
    rule: str
    text: str
    saves_s: float | None = None
    """Most that a step could gain; None where nothing can be gained."""


Rule = Callable[[Facts], Advice | None]


def advise(facts: Facts) -> list[Advice]:
    """What the rules say, the largest gain first."""
    pieces = [advice for rule in RULES if (advice := rule(facts)) is not None]
    return sorted(pieces, key=lambda advice: -(advice.saves_s or 0.0))


def verdict(facts: Facts, advice: Sequence[Advice]) -> str:
    """One paragraph: where the time goes, then the advice that could save most."""
    sentences = [_where_it_goes(facts), *(piece.text for piece in advice[:MOST])]
    if not advice:
        sentences.append("No single thing stands out.")
    return " ".join(sentences)


def _where_it_goes(facts: Facts) -> str:
    own = facts.breakdown
    named = {
        "compute": own.share(*COMPUTE),
        "exposed wire": own.share("wire"),
        "waiting for other ranks": own.share("wait"),
        "copying gradients": own.share("pack"),
        "data": own.share("data", "copy"),
        "other": own.share("other"),
    }
    shares = [
        f"{share:.0%} {name}" for name, share in sorted(named.items(), key=lambda pair: -pair[1]) if share >= 0.01
    ]
    workers = "on one worker" if facts.workers == 1 else f"on {facts.workers} workers"
    workers = "in one process" if facts.row.one_process else workers
    return f"A step of {facts.method} {workers} takes {format_seconds(own.step_s)}: {', '.join(shares)}."


def mostly_compute(facts: Facts) -> Advice | None:
    share = facts.breakdown.share(*COMPUTE)
    if share < MOSTLY_COMPUTE:
        return None
    if facts.workers == 1:
        return Advice("mostly compute", f"The step is {share:.0%} compute: faster cores or more workers would help.")
    saves = _parts(facts, "wire", "wait", "pack")
    text = f"The step is {share:.0%} compute: another method would save at most {format_seconds(saves)}."
    return Advice("mostly compute", text, saves)


def straggler(facts: Facts) -> Advice | None:
    if not facts.stragglers:
        return None
    worst = facts.stragglers[0]
    often = "every step" if worst.late_steps == worst.steps else f"{worst.late_steps} of {worst.steps} steps"
    held_up = "between steps" if worst.phase == BETWEEN else f"in {worst.phase}"
    text = (
        f"Rank {worst.rank} is late {held_up} by {format_seconds(worst.late_s)} in {often}: "
        f"the others wait {worst.waited_share:.0%} of the time"
    )
    if worst.has_fewer_threads:
        text += f"; it has {_threads(worst.threads)}, the others {worst.others_threads}"
    text += f". Without this, a step would save at most {format_seconds(worst.saves_s)}."
    return Advice("straggler", text, worst.saves_s)


def slow_steps(facts: Facts) -> Advice | None:
    if not facts.outliers:
        return None
    worst = facts.outliers[0]
    text = f"{named_steps(worst)} took {format_seconds(worst.step_s)} instead of {format_seconds(worst.usual_s)}"
    if worst.loader_starts:
        text += (
            ", because the data loader started its workers; with DataLoader(persistent_workers=True) it does so once"
        )
    else:
        text += f", most of it in {worst.part}" + (f" on rank {worst.rank}" if facts.workers > 1 else "")
    text += f". Without this, a step would save at most {format_seconds(worst.lost_s)} on average."
    return Advice("slow steps", text, worst.lost_s)


def named_steps(outliers: Outliers) -> str:
    """'3 of 29 steps (10, 20, 30)'."""
    named = ", ".join(map(str, outliers.steps[:MOST_NAMED])) + (", …" if len(outliers.steps) > MOST_NAMED else "")
    return f"{len(outliers.steps)} of {outliers.counted} steps ({named})"


def waiting(facts: Facts) -> Advice | None:
    """Waiting that no regular straggler explains."""
    saves = _parts(facts, "wait") - facts.late_s
    if saves < SOME * facts.breakdown.step_s:
        return None
    text = f"Ranks wait {format_seconds(saves)} of each step for one another, but no rank is always the last"
    if _short_of_cores(facts):
        text += f": {_all_threads(facts)} threads share {facts.cores} cores of a host, so ranks take turns"
    return Advice("waiting", f"{text}. Equally fast ranks would save at most {format_seconds(saves)}.", saves)


def wire_bound(facts: Facts) -> Advice | None:
    share = facts.breakdown.share("wire")
    if share < MUCH_WIRE:
        return None
    wire = _parts(facts, "wire")
    if facts.row.world == "tasks":
        text = (
            f"{share:.0%} of the step is Spark's: it broadcasts the weights, starts tasks, and pickles and sums "
            f"gradients up to the driver. Ranks that keep their weights (method {ON_LINKS}) need none of that."
        )
        return Advice("wire", text, wire)
    buckets = _heavy_buckets(facts.breakdown.buckets)
    where = f" on {_name_buckets(buckets, len(facts.breakdown.buckets))}" if buckets else ""
    more = "more workers will not help" if share >= HALF else "more workers shrink only the rest"
    text = f"{share:.0%} of the step is exposed wire{where}: moving gradients is the limit; {more}."
    return Advice("wire", text, wire)


def sixteen_bits(facts: Facts) -> Advice | None:
    if facts.breakdown.share("wire") < MUCH_WIRE or facts.options.get("transfer_dtype"):
        return None
    if facts.row.in_memory or facts.row.world == "tasks":
        return None  # nothing is sent that could be made smaller
    saves = _parts(facts, "wire") / 2
    how = "" if "transfer_dtype" in facts.row.options else f" with method {ON_LINKS}"
    return Advice("16 bits", f"Sending bf16{how} would save at most {format_seconds(saves)}, but is lossy.", saves)


def sixteen_bit_compute(facts: Facts) -> Advice | None:
    if facts.bf16 is None or facts.breakdown.share(*COMPUTE) < HALF:
        return None
    rate = BF16_RATES[facts.bf16]
    saves = _parts(facts, "forward", "backward") * (1 - 1 / rate)
    text = (
        f"Compute is the limit: precision bf16 would save at most {format_seconds(saves)}, since {facts.bf16} "
        f"multiplies {rate} times as many 16-bit numbers at a time; it rounds what it multiplies to 8 bits."
    )
    return Advice("16-bit compute", text, saves)


def overlap(facts: Facts) -> Advice | None:
    own = facts.breakdown
    if own.overlap is None or own.overlap >= LITTLE_OVERLAP or own.share("wire") < SOME:
        return None
    if facts.row.in_memory or facts.row.world == "tasks":
        return None  # what it does uses the cores that backward uses, or comes before and after all compute
    saves = min(_parts(facts, "wire"), _parts(facts, "backward"))
    if facts.row.overlaps(facts.options):
        if len(own.buckets) > 1:
            return None
        text = "One bucket cannot start before backward ends: a smaller options.bucket_cap_mb would save at most"
    else:
        text = f"Nothing is sent while backward runs: a method that overlaps ({ON_LINKS}) would save at most"
    return Advice("overlap", f"{text} {format_seconds(saves)}.", saves)


def last_bucket(facts: Facts) -> Advice | None:
    """An overlapping method whose last bucket is so large that it cannot start early."""
    own = facts.breakdown
    if own.overlap is None or own.overlap < LITTLE_OVERLAP or own.share("wire") < SOME or len(own.buckets) < 2:
        return None
    last, total = own.buckets[-1], sum(bucket.num_bytes for bucket in own.buckets)
    if last.wire_s < FEW_BUCKETS * _parts(facts, "wire") or last.num_bytes < total / len(own.buckets):
        return None
    if "bucket_cap_mb" not in facts.row.options:
        return None
    text = (
        f"The exposed wire is the last bucket, {last.num_bytes / total:.0%} of the bytes: "
        f"a smaller options.bucket_cap_mb would save at most {format_seconds(last.wire_s)}."
    )
    return Advice("last bucket", text, last.wire_s)


def one_host(facts: Facts) -> Advice | None:
    saves = _parts(facts, "wire")
    if facts.workers == 1 or facts.hosts > 1 or facts.row.in_memory:
        return None
    if facts.breakdown.share("wire") < SOME:
        return None
    text = f"All ranks are on one host: method {IN_MEMORY} sends nothing and would save at most"
    return Advice("one host", f"{text} {format_seconds(saves)}.", saves)


def data_bound(facts: Facts) -> Advice | None:
    share = facts.breakdown.share("data", "copy")
    if share < MUCH_DATA:
        return None
    saves = _parts(facts, "data", "copy")
    if facts.loader_workers:
        workers = "1 worker" if facts.loader_workers == 1 else f"{facts.loader_workers} workers"
        text = f"Waiting for data takes {share:.0%} of the step although {workers} load ahead: more workers, or less"
        return Advice("data", f"{text} to do for each sample, would save at most {format_seconds(saves)}.", saves)
    text = f"Loading data takes {share:.0%} of the step and nothing else runs meanwhile: "
    return Advice("data", f"{text}loading ahead would save at most {format_seconds(saves)}.", saves)


def copying(facts: Facts) -> Advice | None:
    share = facts.breakdown.share("pack")
    if share < SOME:
        return None
    saves = _parts(facts, "pack")
    text = f"Copying and dividing gradients takes {share:.0%} of the step; without that, it would save at most"
    return Advice("copying", f"{text} {format_seconds(saves)}.", saves)


def slow_update(facts: Facts) -> Advice | None:
    share = facts.breakdown.share("update")
    if share < MUCH_UPDATE:
        return None
    saves = _parts(facts, "update")
    text = (
        f"The update takes {share:.0%} of the step: a larger batch makes it less frequent, which would save at most"
    )
    return Advice("update", f"{text} {format_seconds(saves)}.", saves)


def step_times_disagree(facts: Facts) -> Advice | None:
    apart = facts.disagreement
    if apart is None:
        return None
    text = (
        f"Ranks' own step times disagree: {format_seconds(apart.longest_s)} on rank {apart.longest_rank}, "
        f"{format_seconds(apart.shortest_s)} on rank {apart.shortest_rank}; "
        f"{format_seconds(apart.difference_s)} of that is {apart.part}."
    )
    return Advice("step times disagree", text)


def unexplained(facts: Facts) -> Advice | None:
    share = facts.breakdown.share("other")
    if share <= UNEXPLAINED:
        return None
    text = (
        f"{share:.0%} of the step is outside every phase of the log. In a recorded loop, that is what it does "
        "between backward and update, and its calls of syncline.mean, sum, gather and save."
    )
    return Advice("other", text)


RULES: tuple[Rule, ...] = (
    mostly_compute,
    straggler,
    slow_steps,
    waiting,
    wire_bound,
    sixteen_bits,
    sixteen_bit_compute,
    overlap,
    last_bucket,
    one_host,
    data_bound,
    copying,
    slow_update,
    step_times_disagree,
    unexplained,
)


def _parts(facts: Facts, *parts: str) -> float:
    return sum(facts.breakdown.parts_s[part] for part in parts)


def _heavy_buckets(buckets: Sequence[BucketMeans]) -> list[BucketMeans]:
    """The fewest that hold most of the exposed wire, in order of readiness."""
    total, held, chosen = sum(bucket.wire_s for bucket in buckets), 0.0, []
    for bucket in sorted(buckets, key=lambda bucket: -bucket.wire_s):
        if held >= FEW_BUCKETS * total:
            break
        chosen.append(bucket)
        held += bucket.wire_s
    return [bucket for bucket in buckets if bucket in chosen]


def _name_buckets(chosen: Sequence[BucketMeans], count: int) -> str:
    if count == 1:
        return "the only bucket"
    if len(chosen) == 1:
        return chosen[0].label
    return f"{len(chosen)} of {count} buckets"


def _short_of_cores(facts: Facts) -> bool:
    return facts.cores is not None and _all_threads(facts) > facts.cores * facts.hosts


def _all_threads(facts: Facts) -> int:
    return sum(facts.threads.values())


def _threads(count: int | None) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
