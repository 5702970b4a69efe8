"""What method `ahead` gains over DDP and `bucketed`, and how near a step comes to the longer of compute and wire.

    python benchmarks/ahead.py --case vgg11-real --save
    python benchmarks/ahead.py --list

Contenders take turns of several steps in one world of ranks, by the code of `syncline compare`, on emulated hosts of
one thread each. *Compute* is what a step costs when nothing is sent, from steps without synchronisation; *wire* is an
all-reduce of all gradients as one message over the same link, from a probe. The link's rate follows from compute, so
that their ratio is the one that the case names. Replayed cases sleep the recorded compute, so that nothing but the
network is real. The case `one-rank` sends nothing: the machinery runs for a peer that answers at once.

A case takes up to four minutes and refuses to start on a busy machine. Exit code 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support import Contender, ratio, take_turns, write_result
from torch import nn
from torch.nn.functional import cross_entropy

import syncline
from syncline import jobs, worker
from syncline.comm.communicator import Communicator, Operation, Work
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.launcher.places import place_for
from syncline.machine import cores
from syncline.measure.load import busy_seconds
from syncline.running import started
from syncline.sync import GradientSync, make_sync
from syncline.voice import Voice
from syncline.workload.models import build_model
from syncline.workload.recorded import ComputeTimes, load_times

FRAMES = 1514 / 1448
BUSY = 0.1
"""Share of the cores' time that other processes may take before a case; after it, its result is marked."""
ROUNDS = 4
CIFAR10 = 50_000
DDP_SIZES = ("ddp", "ddp:bucket_cap_mb=1.0", "ddp:bucket_cap_mb=5.0", "ddp:bucket_cap_mb=10.0")
COMPUTE_BOUND = ("bucketed", "ahead", "ahead:barrier=false")


@dataclass(frozen=True)
class Aim:
    """At most `limit` times what it is measured against: a contender, `best ddp` or `bound`."""

    contender: str
    against: str
    limit: float


@dataclass(frozen=True)
class Case:
    about: str
    model: str = "vgg11"
    samples: int = 16
    hosts: int = 2
    wire_to_compute: float = 1.45
    link: str = ""
    """The link itself, where its rate does not follow from the ratio."""
    replayed: bool = True
    precision: str = "float32"
    contenders: tuple[str, ...] = ("ddp", "bucketed", "ahead")
    aims: tuple[Aim, ...] = (Aim("ahead", "bound", 1.10),)


NEAR = (Aim("ahead", "bound", 1.12),)
FAST = (Aim("ahead", "ddp", 0.75), Aim("ahead", "best ddp", 0.87))
NO_LOSS = (Aim("ahead", "bucketed", 1.02), Aim("ahead, barrier=false", "bucketed", 1.03))
EPOCH = ("ddp", "bucketed", "ahead", 'ahead:transfer_dtype="bf16"')
CASES = {
    "vgg11-real": Case("real compute", replayed=False, contenders=(*DDP_SIZES, "bucketed", "ahead"), aims=FAST),
    "vgg11-2": Case("replayed on 2 hosts"),
    "vgg11-4": Case("replayed on 4 hosts", hosts=4),
    "resnet50": Case("replayed on 2 hosts", "resnet50", samples=2, wire_to_compute=1.2, aims=NEAR),
    "bert-small": Case("replayed on 2 hosts", "bert-small", samples=4, wire_to_compute=1.2, aims=NEAR),
    "compute-bound": Case(
        "replayed, compute 1.6 x wire", wire_to_compute=1 / 1.6, contenders=COMPUTE_BOUND, aims=NO_LOSS
    ),
    "compute-bound-real": Case(
        "real, compute 1.6 x wire", wire_to_compute=1 / 1.6, replayed=False, contenders=COMPUTE_BOUND, aims=NO_LOSS
    ),
    "epoch": Case("an epoch of CIFAR-10", samples=32, hosts=4, link="1gbit", contenders=EPOCH, aims=()),
    "epoch-bf16": Case(
        "an epoch of CIFAR-10, 16-bit compute", samples=32, hosts=4, link="1gbit", precision="bf16", contenders=EPOCH,
        aims=(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    case: Case
    link: str
    times: ComputeTimes
    wire_s: float
    rows: Mapping[str, dict[str, Any]]
    """By label, as `syncline compare` gives them."""

    @property
    def bound_s(self) -> float:
        return max(self.times.step_s, self.wire_s)

    def ratio_to(self, label: str, against: str) -> float:
        own = self.rows[label]
        if against == "bound":
            return own["step"]["median_s"] / self.bound_s
        if against == "best ddp":
            sizes = [name for name in self.rows if name.startswith("ddp")]
            against = min(sizes, key=lambda name: self.rows[name]["step"]["median_s"])
        return ratio(own["seconds"], self.rows[against]["seconds"])[0]


def record(case: Case, folder: Path) -> ComputeTimes:
    """Compute without synchronisation, on two hosts with one thread each."""
    settings = {"measure.calibration": 8, "evaluate": False}
    plan = {"model": case.model, "data": "synthetic", "method": "ddp", "precision": case.precision}
    syncline.train(
        **plan, hosts=2, workers=2, threads=1, global_batch=2 * case.samples, steps=2, run_dir=folder / "recorded",
        settings=settings,
    )  # fmt: skip
    return load_times(f"replay:{folder / 'recorded'}")


def link_for(case: Case, times: ComputeTimes) -> str:
    if case.link:
        return case.link
    bits = 8 * FRAMES * times.gradient_bytes * 2 * (case.hosts - 1) / case.hosts
    return f"{bits / (case.wire_to_compute * times.step_s) / 1e6:.0f}mbit"


def probe_wire(case: Case, link: str, num_bytes: int, folder: Path) -> float:
    probe = syncline.probe(
        workers=case.hosts, hosts=case.hosts, link=link, threads=1, sizes=[num_bytes], repeats=3, backends=["gloo"],
        run_dir=folder / "probe",
    )  # fmt: skip
    (row,) = (row for row in probe.rows if row["operation"] == "all_reduce")
    return float(row["points"][0]["median_s"])


def compare(case: Case, link: str, folder: Path) -> tuple[list[dict[str, Any]], ComputeTimes]:
    """The rows, and the compute that goes with them: that of the same run where it is real."""
    methods = [word.partition(":")[0] for word in case.contenders]
    about = (
        {"compute": f"replay:{folder / 'recorded'}"} if case.replayed else {"data": "synthetic", "model": case.model}
    )
    about |= {"threads": 1, "global_batch": case.hosts * case.samples, "precision": case.precision}
    about |= {"hosts": case.hosts, "workers": case.hosts, "link": link, "method": methods[0], "max_restarts": 0}
    given = jobs.make_plan(None, {**about, "steps": 8 * ROUNDS, "measure.warmup": 16, "measure.calibration": 8})
    place, voice = place_for(given), Voice("progress")
    plan = jobs.in_blocks(jobs.resolved(given, place, voice, quiet=True), methods)
    with started("compare", plan, place, voice, label=str(case.hosts), run_dir=folder / "compare") as job:
        rows = job.on_ranks(worker.compare, plan, job.run, case.contenders, voice)
        job.finish({"workers": plan.workers, "compute": plan.compute_note, "rows": rows})
    return rows, load_times(f"replay:{folder / 'compare'}")


def measure(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = record(case, folder)
        link = link_for(case, times)
        wire_s = probe_wire(case, link, times.gradient_bytes, folder)
        rows, times = compare(case, link, folder)
    return Result(case, link, times, wire_s, {row["label"]: row for row in rows})


def table(result: Result) -> list[str]:
    lines = ["| contender | step, ms | / ddp | / bound | left after a turn, ms | predicted, ms | predicted / step |"]
    lines.append("|---|---|---|---|---|---|---|")
    per_epoch = -(-CIFAR10 // (result.case.hosts * result.case.samples)) if result.case.link else 0
    if per_epoch:
        lines = [f"{line} {'epoch, s' if n == 0 else '---'} |" for n, line in enumerate(lines)]
    for label, row in result.rows.items():
        step_s, predicted_s = row["step"]["median_s"], (row.get("predicted") or {}).get("step_s")
        to_ddp = f"{result.ratio_to(label, 'ddp'):.2f}" if "ddp" in result.rows else "-"
        cells = [
            label, f"{step_s * 1e3:.0f} ± {row['step']['spread_s'] * 500:.0f}", to_ddp,
            f"{result.ratio_to(label, 'bound'):.2f}", f"{row['left_s'] * 1e3:.0f}",
            f"{predicted_s * 1e3:.0f}" if predicted_s else "-", f"{predicted_s / step_s:.2f}" if predicted_s else "-",
        ]  # fmt: skip
        cells += [f"{step_s * per_epoch:.0f}"] if per_epoch else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdicts(result: Result) -> list[tuple[str, bool]]:
    found = []
    for aim in result.case.aims:
        value = result.ratio_to(aim.contender, aim.against)
        text = f"{aim.contender}: {value:.3f} of {aim.against}, aim at most {aim.limit:.2f}"
        found.append((text, value <= aim.limit))
    for label, row in result.rows.items():
        if row.get("predicted"):
            off = row["predicted"]["step_s"] / row["step"]["median_s"] - 1
            found.append((f"{label}: predicted {off:+.1%} from measured, aim within 5 %", abs(off) <= 0.05))
    return found


def shown(result: Result) -> list[str]:
    case, times, others = result.case, result.times, next(iter(result.rows.values()))["other_load"] or 0.0
    share = busy_share()
    parts = (
        f"data {times.data_s * 1e3:.0f}, forward {times.forward_s * 1e3:.0f}, backward {times.backward_s * 1e3:.0f}"
    )
    lines = [
        f"{case.model}, {case.about}: {case.hosts} emulated hosts, one thread and {case.samples} samples each, "
        f"{case.precision}, link {result.link}.",
        f"Compute {times.step_s * 1e3:.0f} ms ({parts}, update {times.update_s * 1e3:.0f}); wire "
        f"{result.wire_s * 1e3:.0f} ms for {times.gradient_bytes / 1e6:.1f} MB: "
        f"{result.wire_s / times.step_s:.2f} x compute. Bound {result.bound_s * 1e3:.0f} ms.",
        f"Medians of {ROUNDS} turns of 8 steps (the first step of a turn does not count), two turns before them cut; "
        f"{others:.0%} of the cores' time went to others, the kernel's work for the emulated links among them. "
        + (f"**The machine was {share:.0%} busy right after it: figures mean little.**" if share > BUSY else "")
    ]  # fmt: skip
    if not case.replayed and case.wire_to_compute > 1 and not 1.3 <= result.wire_s / times.step_s <= 1.6:
        lines.append("**Wire is not 1.3 to 1.6 x compute: run it again.**")
    return [*lines, "", *table(result)]


# One rank.


class Echo(Communicator):
    """A world of two whose other rank answers at once, with nothing: what a method costs without a wire."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 2
        self.store = ThreadWorld(1).store

    def start(self, operation: Operation) -> Work:
        for part in operation.parts or ():
            part.copy_(operation.tensor)
        return self

    def wait(self) -> None:
        pass

    def split(self, name: str) -> Communicator:
        return self

    def close(self) -> None:
        pass


def one_rank(samples: int = 16) -> tuple[list[str], list[tuple[str, bool]]]:
    """The same loop around the bare model, around `ahead` on one rank, and with its machinery running."""
    torch.set_num_threads(1)
    images, labels = torch.randn(samples, 3, 32, 32), torch.arange(samples) % 10
    images = images.to(memory_format=torch.channels_last)
    syncs: dict[str, GradientSync | None] = {
        "bare": None,
        "ahead": make_sync("ahead", ThreadCommunicator(ThreadWorld(1), 0)),
        "ahead, machinery forced": make_sync("ahead", Echo(), barrier=False),
    }
    contenders = {name: Contender(_turn(sync, images, labels)) for name, sync in syncs.items()}
    seconds = take_turns(contenders, 15, meet=lambda: None, warmup=4)
    lines = [
        f"VGG-11, one thread, {samples} images, the same loop in turns of 4 steps, 15 turns.", "",
        "| contender | step, ms | / bare | quartiles |", "|---|---|---|---|",
    ]  # fmt: skip
    found = []
    for name, own in seconds.items():
        middle, lower, upper = ratio(own, seconds["bare"])
        step_ms = statistics.median(own) / 4 * 1e3
        lines.append(f"| {name} | {step_ms:.0f} | {middle:.3f} | {lower:.3f} to {upper:.3f} |")
        limit = {"ahead": 1.02, "ahead, machinery forced": 1.04}.get(name)
        if limit:
            found.append((f"{name}: {middle:.3f} of bare, aim at most {limit:.2f}", middle <= limit))
    return lines, found


def _turn(sync: GradientSync | None, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    model = build_model("vgg11", seed=0, channels_last=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    module: nn.Module = sync.attach(model) if sync is not None else model

    def turn() -> None:
        for _ in range(4):
            cross_entropy(module(images), labels).backward()
            if sync is not None:
                sync.finish_for_update()
                sync.update(optimizer)
            else:
                optimizer.step()
                optimizer.zero_grad()
        if sync is not None:
            sync.synchronize()

    return turn


def busy_share() -> float:
    """Of the cores' time in the next two seconds; 0 where the system does not tell."""
    before, start_s = busy_seconds(), time.monotonic()
    time.sleep(2.0)
    after = busy_seconds()
    if before is None or after is None:
        return 0.0
    return (after - before) / (time.monotonic() - start_s) / cores()


def refuse_if_busy(patience_s: float = 30.0) -> None:
    """Goes on as soon as the machine is idle."""
    start_s = time.monotonic()
    while (share := busy_share()) > BUSY:
        if time.monotonic() - start_s > patience_s:
            sys.exit(f"Other processes take {share:.0%} of the cores' time: end them, or give --busy to try it out.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "one-rank"], default="vgg11-2")
    parser.add_argument("--samples", type=int, help="on each host, instead of the case's own number")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--busy", action="store_true", help="also on a busy machine; nothing is saved then")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    given = parser.parse_args(arguments)
    if given.list:
        for name, case in CASES.items():
            print(f"{name:20} {case.model}, {case.about}")
        print(f"{'one-rank':20} vgg11, bare beside ahead")
        return
    if not given.busy:
        refuse_if_busy()
    if given.case == "one-rank":
        lines, found = one_rank()
    else:
        case = CASES[given.case]
        result = measure(replace(case, samples=given.samples or case.samples))
        lines, found = shown(result), verdicts(result)
    lines += ["", *(f"- {text}: {'yes' if held else '**missed**'}" for text, held in found)]
    name = f"ahead-{given.case}" + (f"-{given.samples}-samples" if given.samples else "")
    write_result(name, lines, save=given.save and not given.busy)
    sys.exit(0 if all(held for _, held in found) else 1)


if __name__ == "__main__":
    main()
