"""Answers of the lab cse5194-scaling: how far each model scales over nodes, which scales best, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from syncline.measure.fits import NAMES, Law, describe
from syncline.methods import BASELINE
from syncline.study.answering import Rows, listed, missing, read
from syncline.study.rows import Row, baseline_of
from syncline.study.values import fit_rows
from syncline.units import format_bytes

TIE = 0.02
"""Efficiencies that lie closer together have no order."""


@dataclass(frozen=True)
class _Reached:
    """What a model reached on the most nodes."""

    row: Row
    nodes: int
    speedup: float
    efficiency: float

    @property
    def name(self) -> str:
        return str(self.row.point.get("model", self.row.method))


def _reached(rows: Rows) -> list[_Reached]:
    """For each model, the row on the most nodes, the most efficient first; all on the same number of nodes."""
    results = []
    for row in rows:
        base = baseline_of(row, rows)
        speedup, efficiency = (read(name, row, rows) for name in ("speedup", "efficiency"))
        if base is not None and speedup is not None and efficiency is not None and row.method != BASELINE:
            results.append(_Reached(row, row.workers // base.workers, speedup, efficiency))
    models = {result.name for result in results}
    sizes = {result.nodes for result in results}
    shared = [n for n in sizes if {result.name for result in results if result.nodes == n} == models]
    most = max(shared, default=1)
    best: dict[str, _Reached] = {}
    for result in results:
        if result.nodes == most > 1 and (result.name not in best or result.efficiency > best[result.name].efficiency):
            best[result.name] = result
    return sorted(best.values(), key=lambda result: -result.efficiency)


def scales_best(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which model scales best, and whether bytes against operations explain it."""
    results = _reached(rows)
    if len(results) < 2:
        return missing("two models on several nodes")
    first, last = results[0], results[-1]
    equal = [result.name for result in results[1:] if first.efficiency - result.efficiency < TIE]
    if len(equal) == len(results) - 1:
        text = f"On {first.nodes} nodes no model scales better than another: {_shares(results)}."
    else:
        also = f" (no measurable difference from {listed(equal)})" if equal else ""
        text = (
            f"On {first.nodes} nodes {first.name} scales best{also}: {first.speedup:.2f} times one node, an "
            f"efficiency of {first.efficiency:.0%}; {last.name} reaches {last.speedup:.2f} times, "
            f"{last.efficiency:.0%}."
        )
    return f"{text} {_why(results)}"


def bytes_against_flops(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Does what a model sends for each operation explain how it scales?"""
    results = _reached(rows)
    return _why(results) if len(results) > 1 else missing("two models on several nodes")


def _why(results: Sequence[_Reached]) -> str:
    """Compares the order of efficiencies with that of bytes for each operation; says so where they disagree."""
    by_flops = {result.name: read("bytes_per_gflop", result.row) for result in results}
    sent = {name: value for name, value in by_flops.items() if value is not None}
    if len(sent) < len(results):
        return "How much the models send per operation is not known."
    clear = [(a, b) for a, b in combinations(results, 2) if a.efficiency - b.efficiency >= TIE]
    if not clear:
        return f"Bytes of gradients per GFLOP do not separate them here: {_listed(sent)}."
    against = [(a, b) for a, b in clear if sent[a.name] >= sent[b.name]]
    if not against:
        return (
            f"They rank as their bytes of gradients per GFLOP do, {_listed(sent)}: the less a model sends for the "
            "same work, the less a node waits."
        )
    better, worse = against[0]
    text = (
        f"Bytes per operation do not explain this order ({_listed(sent)}): {better.name} sends "
        f"{_size(sent[better.name])} per GFLOP and {worse.name} {_size(sent[worse.name])}, yet {better.name} scales "
        "better"
    )
    return f"{text}{_by_time(clear)}."


def _by_time(clear: Sequence[tuple[_Reached, _Reached]]) -> str:
    """Operations are not all equally fast: the time that a node computes is what an exchange can hide behind."""
    asked = {result.name: read("asked_rate", result.row) for pair in clear for result in pair}
    rates = {name: rate for name, rate in asked.items() if rate is not None}
    if len(rates) < len(asked) or any(rates[a.name] >= rates[b.name] for a, b in clear):
        return ""
    listed = ", ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in sorted(rates.items(), key=lambda p: p[1]))
    return f"; bytes per second of compute do explain it ({listed}), because operations differ in speed"


def scaling_by_model(rows: Rows, others: Mapping[str, Rows]) -> str:
    """How far each model scales, at one batch per node and at one global batch."""
    by_model: dict[str, list[str]] = {}
    stages = [("at one batch per node (weak)", rows)]
    stages += [("at one global batch (strong)", stage_rows) for stage_rows in others.values()]
    for kind, stage_rows in stages:
        for result in _reached(stage_rows):
            gain = "" if result.speedup > 1 else ", which does not pay off"
            reached = f"{result.speedup:.2f} times one node on {result.nodes} nodes"
            words = f"{reached} {kind}, {result.efficiency:.0%}{gain}"
            by_model.setdefault(result.name, []).append(words)
    if not by_model:
        return missing("scaling against one node")
    return "\n".join(f"{name}: {'; '.join(words)}." for name, words in by_model.items())


def gpu_figures(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What the figures that show GPUs would take: they cannot be had from CPU nodes."""
    models = listed(list(dict.fromkeys(str(row.point.get("model")) for row in rows)) or ["the models"])
    return (
        "They show what figures 3, 5 and 7 show, on GPUs, and no figure here stands for them. They need nodes with a "
        f"GPU each, torch with CUDA and NCCL between them: figure 4 the batch sweep of {models} on one node "
        "(`syncline lab cse5194-scaling --set device=cuda`), figures 6 and 8 training on 1, 2, 4 and 8 nodes "
        "(`syncline train --nodes … --set device=cuda`), because emulated hosts share this machine's devices and "
        "replay sleeps on the CPU."
    )


def laws(rows: Rows, others: Mapping[str, Rows]) -> str:
    """What Amdahl (first stage, strong) and Gustafson (second, weak) make of it."""
    sentences = _law("amdahl", rows)
    for these in others.values():
        sentences += _law("gustafson", these)
    return "\n".join(sentences) or missing("scaling on two sizes beside one node")


def _law(law: Law, rows: Rows) -> list[str]:
    sentences = []
    for result in _reached(rows):
        fit = fit_rows(law, result.row, rows)
        if fit is not None:
            sentences.append(f"{NAMES[law]}, {result.name}: {describe(fit)}.")
    return sentences


def _shares(results: Sequence[_Reached]) -> str:
    return ", ".join(f"{result.name} {result.efficiency:.0%}" for result in results)


def _listed(sent: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_size(value)}" for name, value in sorted(sent.items(), key=lambda pair: pair[1]))


def _size(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))
