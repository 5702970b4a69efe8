"""Every rule of explain's advice: facts that make it speak, and facts that must leave it silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from syncline.accounting.advice import RULES, Facts, advise, verdict
from syncline.accounting.breakdown import PARTS, Breakdown, BucketMeans, RankMeans
from syncline.accounting.outliers import Outliers
from syncline.accounting.stragglers import Disagreement, Straggler


def facts(
    *,
    method: str = "bucketed",
    workers: int = 2,
    overlap: float | None = 0.5,
    buckets: list[tuple[int, float]] | None = None,
    stragglers: list[Straggler] | None = None,
    disagreement: Disagreement | None = None,
    hosts: int = 2,
    cores: int | None = 2,
    threads: int = 1,
    options: dict[str, Any] | None = None,
    outliers: list[Outliers] | None = None,
    bf16: str | None = None,
    **milliseconds: float,
) -> Facts:
    """Parts in milliseconds; buckets as (bytes, exposed wire in milliseconds)."""
    parts = {part: milliseconds.get(part, 0.0) / 1e3 for part in PARTS}
    step_s = sum(parts.values())
    ranks = [RankMeans(rank, step_s, parts, 0.0) for rank in range(workers)]
    means = [BucketMeans(f"bucket {i}", size, wire / 1e3, wire / 1e3) for i, (size, wire) in enumerate(buckets or [])]
    own = Breakdown(10, step_s, step_s, parts, 0.0, overlap, ranks, [], means)
    counts = dict.fromkeys(range(workers), threads)
    positional = (method, own, stragglers or [], disagreement, hosts, cores, counts, options or {}, outliers or [])
    return Facts(*positional, bf16=bf16)


LATE = Straggler(
    2, "backward", 0.21, 10, 10, waited_s=0.2, waited_share=0.18, saves_s=0.15, threads=2, others_threads=2
)
SLOW = Straggler(1, "data", 0.05, 4, 10, waited_s=0.02, waited_share=0.07, saves_s=0.02, threads=1, others_threads=4)
APART = Disagreement(1, 1.4, 0, 0.89, "wait", 0.5)
STARTS = Outliers([10, 20], 29, "data", 1, step_s=0.6, usual_s=0.1, lost_s=0.034, loader_starts=True)
HICCUP = Outliers(list(range(6)), 60, "update", 1, step_s=0.3, usual_s=0.1, lost_s=0.02, loader_starts=False)
QUIET = {"forward": 30.0, "backward": 40.0, "update": 8.0, "pack": 5.0, "wait": 5.0, "wire": 8.0, "other": 4.0}

SPEAKS: dict[str, tuple[Facts, list[str], float | None]] = {
    "mostly compute": (
        facts(forward=30, backward=56, update=10, wire=3, wait=1),
        ["96% compute", "another method would save at most 4.0 ms"],
        0.004,
    ),
    "straggler": (
        facts(**QUIET, stragglers=[LATE]),
        ["Rank 2 is late in backward by 210 ms in every step", "the others wait 18% of the time", "at most 150 ms"],
        0.15,
    ),
    "slow steps": (
        facts(**QUIET, outliers=[STARTS]),
        ["2 of 29 steps (10, 20) took 600 ms instead of 100 ms", "persistent_workers=True", "at most 34.0 ms"],
        0.034,
    ),
    "waiting": (
        facts(forward=40, backward=40, wait=20, workers=4, threads=1, hosts=1),
        ["wait 20.0 ms", "no rank is always the last", "4 threads share 2 cores", "at most 20.0 ms"],
        0.02,
    ),
    "wire": (
        facts(forward=20, backward=18, wire=62, buckets=[(9, 2), (9, 30), (9, 30)]),
        ["62% of the step is exposed wire on 2 of 3 buckets", "moving gradients is the limit", "will not help"],
        0.062,
    ),
    "16 bits": (facts(forward=30, backward=30, wire=40), ["bf16 would save at most 20.0 ms", "lossy"], 0.02),
    "16-bit compute": (
        facts(forward=30, backward=50, update=10, wire=10, bf16="avx512_bf16"),
        ["precision bf16 would save at most 40.0 ms", "avx512_bf16 multiplies 2 times as many"],
        0.04,
    ),
    "overlap": (
        facts(method="all-reduce", overlap=0.0, forward=30, backward=50, wire=60),
        ["Nothing is sent while backward runs", "(bucketed) would save at most 50.0 ms"],
        0.05,
    ),
    "last bucket": (
        facts(forward=30, backward=40, wire=20, buckets=[(10, 1), (30, 19)]),
        ["the last bucket, 75% of the bytes", "options.bucket_cap_mb", "at most 19.0 ms"],
        0.019,
    ),
    "one host": (
        facts(hosts=1, forward=30, backward=40, wire=20),
        ["one host", "shared-memory", "at most 20.0 ms"],
        0.02,
    ),
    "data": (facts(data=15, copy=5, forward=40, backward=40), ["20% of the step", "at most 20.0 ms"], 0.02),
    "copying": (facts(forward=40, backward=40, pack=12), ["13% of the step", "at most 12.0 ms"], 0.012),
    "update": (facts(forward=40, backward=30, update=30), ["update takes 30%", "at most 30.0 ms"], 0.03),
    "step times disagree": (
        facts(**QUIET, disagreement=APART),
        ["1.40 s on rank 1", "890 ms on rank 0", "500 ms of that is wait"],
        None,
    ),
    "other": (facts(forward=40, backward=40, other=6), ["7% of the step is outside every phase"], None),
}
SILENT: dict[str, list[Facts]] = {
    "mostly compute": [facts(**QUIET)],
    "straggler": [facts(**QUIET)],
    "slow steps": [facts(**QUIET)],
    "waiting": [
        facts(**QUIET),
        # A straggler explains it: 200 ms on each of the others, one of two ranks.
        facts(forward=300, backward=300, wait=100, stragglers=[LATE]),
    ],
    "wire": [facts(**QUIET)],
    "16 bits": [
        facts(forward=40, backward=40, wire=20),
        facts(forward=30, backward=30, wire=40, options={"transfer_dtype": "bf16"}),
        facts(forward=30, backward=30, wire=40, method="shared-memory"),
    ],
    "16-bit compute": [
        facts(forward=30, backward=50, update=10, wire=10),
        facts(forward=20, backward=20, wire=60, bf16="avx512_bf16"),
    ],
    "overlap": [
        facts(method="all-reduce", overlap=0.0, forward=50, backward=50, wire=5),
        facts(overlap=0.5, forward=30, backward=50, wire=60),
        facts(overlap=0.0, forward=30, backward=50, wire=60, buckets=[(9, 30), (9, 30)]),
        facts(overlap=0.0, forward=30, backward=50, wire=60, method="shared-memory"),
        facts(overlap=None, forward=30, backward=50, workers=1),
    ],
    "last bucket": [
        facts(forward=30, backward=40, wire=20, buckets=[(30, 10), (30, 10)]),
        facts(forward=30, backward=40, wire=20, buckets=[(30, 1), (10, 19)]),  # it is the small one already
        facts(forward=30, backward=40, wire=20, buckets=[(30, 20)]),
        facts(**QUIET, buckets=[(10, 0), (30, 8)]),
        facts(forward=30, backward=40, wire=20, buckets=[(10, 1), (30, 19)], overlap=0.0),
    ],
    "one host": [
        facts(hosts=2, forward=30, backward=40, wire=20),
        facts(hosts=1, forward=30, backward=40, wire=20, method="shared-memory"),
        facts(hosts=1, **QUIET),
    ],
    "data": [facts(data=5, **QUIET)],
    "copying": [facts(**QUIET)],
    "update": [facts(**QUIET)],
    "step times disagree": [facts(**QUIET)],
    "other": [facts(**QUIET)],
}


def rules_of(given: Facts) -> dict[str, Any]:
    return {advice.rule: advice for advice in advise(given)}


def test_every_rule_is_tested_both_ways() -> None:
    assert len(SPEAKS) == len(SILENT) == len(RULES)
    assert SPEAKS.keys() == SILENT.keys()


@pytest.mark.parametrize("rule", SPEAKS)
def test_rule_speaks(rule: str) -> None:
    given, words, saves_s = SPEAKS[rule]
    advice = rules_of(given)[rule]
    assert [word for word in words if word not in advice.text] == [], advice.text
    assert advice.saves_s == (None if saves_s is None else pytest.approx(saves_s))


@pytest.mark.parametrize(("rule", "given"), [(rule, one) for rule, every in SILENT.items() for one in every])
def test_rule_is_silent(rule: str, given: Facts) -> None:
    assert rule not in rules_of(given)


def test_straggler_with_fewer_threads_and_not_every_step() -> None:
    text = rules_of(facts(**QUIET, stragglers=[SLOW]))["straggler"].text
    assert "late in data by 50.0 ms in 4 of 10 steps" in text
    assert "it has 1 thread, the others 4" in text


def test_slow_steps_without_a_loader_name_part_and_rank() -> None:
    text = rules_of(facts(**QUIET, outliers=[HICCUP]))["slow steps"].text
    assert text.startswith(
        "6 of 60 steps (0, 1, 2, 3, 4, …) took 300 ms instead of 100 ms, most of it in update on rank 1."
    )


def test_data_that_is_loaded_ahead_needs_more_workers() -> None:
    given = replace(facts(data=20, forward=40, backward=40), loader_workers=2)
    text = rules_of(given)["data"].text
    assert text.startswith(
        "Waiting for data takes 20% of the step although 2 workers load ahead: more workers, or less"
    )


def test_one_bucket_of_an_overlapping_method_is_told_to_be_smaller() -> None:
    text = rules_of(facts(overlap=0.0, forward=30, backward=50, wire=60, buckets=[(9, 60)]))["overlap"].text
    assert "One bucket cannot start before backward ends" in text
    assert "options.bucket_cap_mb" in text


def test_16_bits_name_a_method_that_has_them() -> None:
    text = rules_of(facts(forward=30, backward=30, wire=40, method="ddp"))["16 bits"].text
    assert "Sending bf16 with method bucketed would" in text


def test_verdict_says_where_time_goes_and_the_largest_gain_first() -> None:
    given = facts(hosts=1, forward=20, backward=18, wire=60, other=2, buckets=[(9, 60)])
    text = verdict(given, advise(given))
    assert text.startswith("A step of bucketed on 2 workers takes 100 ms: 60% exposed wire, 38% compute, 2% other. ")
    assert text.index("exposed wire on the only bucket") < text.index("bf16")
    assert text.count("save at most") == 2  # shared-memory and bf16: three pieces of advice in all


def test_verdict_for_one_worker_speaks_of_no_other_rank() -> None:
    given = facts(method="single", workers=1, overlap=None, hosts=1, forward=30, backward=60, update=5, data=5)
    text = verdict(given, advise(given))
    assert "on one worker" in text
    assert "95% compute" in text
    assert not any(word in text for word in ("rank", "method changes", "wire", "shared-memory"))


def test_verdict_without_advice() -> None:
    given = facts(**QUIET)
    assert verdict(given, advise(given)).endswith("No single thing stands out.")
