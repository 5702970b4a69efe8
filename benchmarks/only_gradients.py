"""What travels besides gradients, and what goes wrong if only gradients are sent. Two ranks as threads.

    python benchmarks/only_gradients.py --save

The experiment is `syncline/labs/hpml-dataparallel/experiments.py`; the lab runs it on two processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from support import write_result

from syncline.comm import Communicator, instrumented
from syncline.comm.threads import run_threads
from syncline.spans import EventLog
from syncline.study.lab_code import LABS, load_file
from syncline.units import format_bytes

LAB = load_file(LABS / "hpml-dataparallel" / "experiments.py")


def words(case: Any) -> str:
    start = "same" if case.same_start else "**different**"
    return f"{start} | {'all' if case.all_classes else '**half on each rank**'} | {case.batch_norm}"


def run(case: Any, about: Any) -> list[Any]:
    def on_rank(backend: Communicator) -> Any:
        log = EventLog(rank=backend.rank, world_size=LAB.RANKS)
        return LAB.live(instrumented(backend, log, deadline_s=600), log, case, about)

    return run_threads(LAB.RANKS, on_rank, deadline_s=600)


def apart(first: torch.Tensor, second: torch.Tensor) -> str:
    distance = LAB.distance(first, second)
    return f"{distance:.1e}" if distance else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    about = LAB.experiment(chosen.steps, chosen.batch)
    ends = ["| start | classes | batch norm | weights apart | running means apart | test accuracy, rank 0 and 1 |"]
    ends.append("|---|---|---|---|---|---|")
    sent = ["| batch norm | gradients | buffers | statistics |", "|---|---|---|---|"]
    for case in LAB.CASES:
        first, second = run(case, about)
        distances = f"{apart(first.weights, second.weights)} | {apart(first.running_means, second.running_means)}"
        rates = ", ".join(f"{accuracy:.1%}" for accuracy in first.accuracies)
        ends.append(f"| {words(case)} | {distances} | {rates} |")
        if case.same_start and case.all_classes:
            kinds = [first.sent.get(kind, (0, 0)) for kind in LAB.KINDS]
            cells = [f"{count} messages, {format_bytes(size)}" if count else "-" for count, size in kinds]
            sent.append(f"| {case.batch_norm} | {' | '.join(cells)} |")
    sizes = f"{chosen.steps} steps of {chosen.batch} synthetic images on {LAB.RANKS} ranks, {LAB.MODEL}."
    apart_is = "Apart: length of the difference over length. Each rank is tested with its own weights and buffers."
    lines = [sizes, apart_is, "", *ends, "", "What a rank gives to one step, bytes before any collective:", "", *sent]
    write_result("only_gradients", lines, save=chosen.save)


if __name__ == "__main__":
    main()
