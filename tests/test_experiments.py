"""What a study can run besides plans: probes, experiments of its own, named variants, and cells that must fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Cli
from helpers import on_threads

from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.marks import STRETCHED
from syncline.measure.capacity import fitted, in_child, ladder
from syncline.plan import load_plan
from syncline.spans import EventLog
from syncline.study.cell_rows import with_links
from syncline.study.cells import Cell, Ground, expand
from syncline.study.estimate import does_not_fit, needed_bytes
from syncline.study.file import load_study, parse_study
from syncline.study.lab_code import LABS, load_file
from syncline.study.rows import Row
from syncline.workload.data.synthetic import synthetic_images

STUDY = """
title = "Experiments"
question = "What is the link worth?"
answer = "link-use"
answer_stage = "time"
[plan]
model = "mlp"
data = "synthetic"
threads = 1
evaluate = false
"measure.calibration" = 0
[[stage]]
name = "link"
run = "probe"
grid = { workers = [2] }
plan = { steps = 1 }
[[stage]]
name = "order"
run = "function"
call = "syncline.measure.sampler:epochs_of_samplers"
plan = { workers = 2, global_batch = 100 }
[[stage]]
name = "time"
methods = ["ddp"]
plan = { batch_per_worker = 4, workers = 2, steps = 5 }
[[table]]
title = "Rates"
stage = "time"
values = ["bus_bandwidth", "utilisation", "of_probe", "epoch", "memory"]
main = true
[[table]]
title = "Link"
stage = "link"
rows = ["backend", "operation"]
values = ["latency", "link_rate"]
[[table]]
title = "Order"
stage = "order"
rows = ["sampler"]
values = ["same_batches", "seen"]
"""


def test_probes_and_experiments_are_stages(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    done = cli("lab", "small.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "runs" / "lab-small" / "report" / "report.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in report.splitlines() if line.startswith("| ")}
    assert " - " not in lines["ddp"], "each of its values was measured"
    assert lines["ddp"].count("%") == 2
    assert "| gloo | send_receive |" in report
    assert "| shared-memory | all_reduce |" in report
    assert lines["DistributedSampler"] == "| DistributedSampler | 100.0% | 50.0% |"
    assert lines["DistributedSampler, set_epoch"].startswith("| DistributedSampler, set_epoch | 0.0% |")
    assert "that the link carries" in done.stdout or "No answer: other programs took" in done.stdout


# Variants, and what fits.


def test_a_variant_is_a_cell_with_keys_that_belong_together() -> None:
    _, study = load_study("hpml-dataparallel")
    stage = next(stage for stage in study.stage if stage.name == "learn")
    full = {cell.point["variant"]: cell.plan for cell in expand(study, stage, Ground(), quick=False)}
    assert [plan.global_batch for plan in full.values()] == [128, 2048, 2048, 2048]
    assert full["batch 2048, rate x 16, warm-up"].optimizer.warmup == "gradual"
    assert not full["batch 2048"].optimizer.linear_scaling
    quick = expand(study, stage, Ground(), quick=True)
    assert {cell.plan.global_batch for cell in quick} == {128, 1024}
    assert len({cell.name for cell in quick}) == 4


def test_the_scaled_rate_is_the_small_batch_s_times_the_growth() -> None:
    from syncline.workload.recipes import learning_rate

    _, study = load_study("hpml-dataparallel")
    stage = next(stage for stage in study.stage if stage.name == "learn")
    for quick, growth in ((False, 16), (True, 8)):
        plans = [cell.plan for cell in expand(study, stage, Ground(), quick=quick)]
        small, same, scaled, warmed = (
            learning_rate(plan.optimizer, 99, 100, plan.global_batch, 10) for plan in plans
        )
        assert same == small
        assert scaled == warmed == pytest.approx(growth * small)
        assert learning_rate(plans[3].optimizer, 0, 100, plans[3].global_batch, 10) < scaled


def cell(workers: int, batch: int, *methods: str) -> Cell:
    plan = load_plan(None, {"model": "mlp", "data": "synthetic", "workers": workers, "global_batch": batch})
    return Cell("s", "compare", plan, methods, {}, 1)


def test_a_cell_that_is_too_large_by_measured_bytes_is_left_out() -> None:
    figures = {"bytes_per_sample": 1e6, "process_bytes": 1e8, "room_bytes": 1e9}
    measured = [Row("memory", {"model": "mlp"}, figures=figures)]
    assert does_not_fit(cell(2, 800, "ddp"), measured) is None
    assert does_not_fit(cell(2, 900, "ddp"), measured) == (
        "needs about 1.1 GB of memory, at a measured 1.0 MB per sample; 1.0 GB is available"
    )
    assert needed_bytes(cell(2, 800, "ddp", "thread-replicas"), 1e6, 1e8) == 1.8e9, "rank 0 takes the whole batch too"
    assert does_not_fit(cell(2, 10**9, "ddp"), []) is None
    assert does_not_fit(cell(2, 10**9, "ddp"), [Row("memory", {"model": "cnn"}, figures=figures)]) is None


def test_fits_names_an_earlier_stage() -> None:
    with pytest.raises(PlanError, match="stage link: fits must name an earlier stage, not 'time'"):
        parse_study(STUDY.replace('run = "probe"', 'run = "probe"\nfits = "time"'), "x")


def test_a_limit_ends_the_child_and_nothing_else() -> None:
    allowed = in_child("cnn", 2**30, (64, 512))
    assert [batch for batch, _ in allowed] == [64, 512]
    assert allowed[1][1] > allowed[0][1], "a larger batch has a higher peak"
    assert in_child("cnn", 2**20, (4096,)) == [], "1 MiB is not enough for 4096 samples"


def test_the_ladder_ends_with_the_first_batch_that_does_not_fit() -> None:
    assert fitted([(8, 180), (16, 260), (32, 420)]) == pytest.approx((10, 100))
    assert ladder(32, 10, 100, 100 + 10 * 512) == [32, 128, 512, 2048]
    assert ladder(32, 10, 100, 0) == [32]


def test_rows_get_the_link_of_a_probe_with_as_many_workers() -> None:
    points = [{"bytes": 1000, "bytes_per_s": 1.0}, {"bytes": 9000, "bytes_per_s": 2.0}]
    wire = {"workers": 2, "backend": "gloo"}
    rows = [
        Row("link", {**wire, "operation": "send_receive"}, figures={"points": points, "link_rate": 5.0}),
        Row("link", {**wire, "operation": "all_reduce"}, figures={"points": points, "link_rate": 7.0}),
        *(Row("time", {"method": method, "workers": count}, [1.0], {"gradient_bytes": 8000})
          for method, count in (("ddp", 2), ("ddp", 4), ("shared-memory", 2))),
    ]  # fmt: skip
    two, four, memory = (row.figures for row in with_links(rows)[2:])
    shared = with_links([replace(rows[1], marks=(STRETCHED,)), rows[2]])[1].figures
    assert "probe_bytes_per_s" not in shared, "ranks that share cores reach no bound"
    assert (two["link_bytes_per_s"], two["probe_bytes_per_s"]) == (5.0, 2.0)
    assert "link_bytes_per_s" not in four
    assert "link_bytes_per_s" not in memory


# The experiments themselves.

LAB = load_file(LABS / "hpml-dataparallel" / "experiments.py")


def test_epochs_are_compared_batch_by_batch() -> None:
    assert LAB.compare_epochs([[1, 2, 3, 4], [1, 2, 4, 3]], 2, 8) == {
        "same_batches": 0.5,
        "same_shard": 1.0,
        "seen": 0.5,
    }
    assert LAB.compare_epochs([[1, 2], [3, 4]], 2, 8) == {"same_batches": 0.0, "same_shard": 0.0, "seen": 0.5}


def test_only_a_sampler_that_is_told_the_epoch_shuffles_again() -> None:
    def on_rank(communicator: Communicator, _: EventLog) -> list[dict[str, Any]]:
        plan = load_plan(None, {"workers": 2, "global_batch": 100, "data": "synthetic"})
        return LAB.epochs_of_samplers(SimpleNamespace(plan=plan, communicator=communicator))

    untold, told, own = on_threads(2, on_rank)[0]
    assert (untold["same_batches"], untold["same_shard"], untold["seen"]) == (1.0, 1.0, 0.5)
    for row in (told, own):
        assert row["same_batches"] == 0.0
        assert row["same_shard"] == pytest.approx(0.5, abs=0.05)
        assert row["seen"] == pytest.approx(0.875, abs=0.02)


def test_what_travels_and_what_drifts() -> None:
    about = LAB.experiment(2, 8, synthetic_images(200, 50))

    def on_rank(communicator: Communicator, log: EventLog) -> list[dict[str, Any]]:
        cases = [LAB.CASES[0], LAB.CASES[1], LAB.CASES[2], LAB.Case("local", same_start=False)]
        return [LAB._row(case, LAB.live(communicator, log, case, about), communicator) for case in cases]

    local, broadcast, sync, apart = on_threads(2, on_rank, deadline_s=60)[0]
    size = 4 * 579_786
    assert local["gradient_bytes"] == broadcast["gradient_bytes"] == sync["gradient_bytes"] == size
    assert local["start_bytes"] > size, "weights and buffers"
    assert (local["buffers"], local["statistics"]) == (0, 0)
    assert broadcast["buffers"] == local["start_bytes"] - size
    assert sync["statistics"] > 0
    assert [row["weights_apart"] for row in (local, broadcast, sync)] == [0, 0, 0]
    assert apart["weights_apart"] > 0.1
    assert local["means_apart"] > 0
    assert sync["means_apart"] == 0
    assert {"accuracy_0", "accuracy_1"} <= local.keys()


def test_the_experiment_takes_two_ranks() -> None:
    def on_rank(communicator: Communicator, log: EventLog) -> Any:
        return LAB.travels(SimpleNamespace(plan=load_plan(None, {}), communicator=communicator, log=log))

    with pytest.raises(PlanError, match="takes 2 ranks, not 1"):
        on_threads(1, on_rank)


def test_distance_is_zero_only_for_equal_bits() -> None:
    one = torch.tensor([3.0, 4.0])
    assert LAB.distance(one, one.clone()) == 0
    assert LAB.distance(one, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
