"""Scaling over nodes: the lab's cells, what a node is held against, the two laws, and what is concluded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.machine import estimated_bytes
from syncline.marks import ON_LINKS, ON_LOOPBACK, REPLAYED, Mark
from syncline.measure.fits import describe, fit_law
from syncline.plan import load_plan
from syncline.store import create_run
from syncline.study.answering import ANSWERS
from syncline.study.cell_rows import best_points, rows_of
from syncline.study.cells import Cell, Ground, expand
from syncline.study.estimate import Estimate, cost_of, estimate
from syncline.study.figures import build_figure
from syncline.study.file import Figure, Table, load_study, parse_study
from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Row, baseline_of
from syncline.study.tables import build_table
from syncline.study.values import VALUES

OWN = load_answers(LABS / "cse5194-scaling")

LAB = load_study("cse5194-scaling")[1]
THREADS, BATCH, WEAK, STRONG = LAB.stage
MODELS = ("resnet50", "inception-v3", "vgg16")


def at(model: str, nodes: int, seconds: float, *, stage: str = "weak", per_node: int = 1, **more: Any) -> Row:
    """A row of the weak stage (one batch of 16 per node), or of the strong one (32 over all nodes)."""
    batch = {"batch_per_node": 16, "global_batch": 16 * nodes} if stage == "weak" else {"global_batch": 32}
    point = {"model": model, "method": "bucketed", "nodes": nodes, "workers": nodes * per_node, "threads": 1}
    point |= {"workers_per_node": per_node, "compute": f"replay:cells/{batch['global_batch'] // nodes}", **batch}
    return Row(stage, point, seconds=[seconds] * 5, **more)


# Cells.


def test_the_sweep_takes_no_more_threads_than_the_machine_has_cores() -> None:
    for cores, pairs in ((2, 3), (4, 6), (16, 12)):
        cells = expand(LAB, THREADS, Ground(cores=cores), quick=False)
        assert len(cells) == 3 * pairs
        assert max(cell.plan.workers * (cell.plan.threads or 0) for cell in cells) == cores
    assert {cell.plan.global_batch for cell in cells} == {8}


def test_each_model_is_scaled_at_its_own_best() -> None:
    rows = [
        Row("threads", {"model": model, "workers_per_node": p, "threads": t, "global_batch": 8}, seconds=[seconds])
        for model, p, t, seconds in (
            ("resnet50", 1, 2, 1.0), ("resnet50", 2, 1, 2.0),
            ("inception-v3", 1, 2, 2.0), ("inception-v3", 2, 1, 1.0),
            ("vgg16", 1, 1, 1.0), ("vgg16", 2, 1, 2.0),
        )
    ]  # fmt: skip
    cells = expand(LAB, BATCH, Ground(), quick=False, best=best_points(BATCH, rows))
    chosen = {cell.plan.model: (cell.plan.workers, cell.plan.threads) for cell in cells}
    assert chosen == {"resnet50": (1, 2), "inception-v3": (2, 1), "vgg16": (1, 1)}
    swept = [
        Row("batch", {**cell.point, "method": "bucketed", "global_batch": cell.plan.global_batch}, seconds=[1.0])
        for cell in cells
    ]
    weak = expand(LAB, WEAK, Ground(), quick=False, best=best_points(WEAK, swept))
    assert {cell.point["batch_per_node"] for cell in weak} == {32}, "the largest batch had the same step time"
    assert [(cell.plan.workers, cell.plan.global_batch) for cell in weak if cell.plan.model == "inception-v3"] == [
        (2, 32), (4, 64), (8, 128), (16, 256)
    ]  # fmt: skip


def test_the_batch_sweep_records_all_that_scaling_replays() -> None:
    for quick in (True, False):
        recorded = {
            (cell.plan.model, cell.plan.global_batch // cell.plan.workers): cell.name
            for cell in expand(LAB, BATCH, Ground(), quick=quick)
        }
        for stage in (WEAK, STRONG):
            cells = expand(LAB, stage, Ground(), quick=quick, recorded=recorded)
            assert all(cell.plan.replayed and cell.why_not is None for cell in cells)
            assert all("single" not in cell.methods for cell in cells)


def test_what_an_earlier_stage_does_not_give_is_skipped_with_the_reason() -> None:
    nothing = expand(LAB, BATCH, Ground(), quick=False, best={("resnet50",): {"workers_per_node": 1, "threads": 2}})
    assert {cell.why_not for cell in nothing if cell.plan.model == "resnet50"} == {None}
    assert {cell.why_not for cell in nothing if cell.plan.model == "vgg16"} == {
        "stage threads measured nothing for vgg16, so it has no best values"
    }


def test_a_replayed_cell_is_the_same_wherever_the_folder_lies() -> None:
    names = [
        [cell.name for cell in expand(LAB, STRONG, Ground(), quick=True, recorded=_anything(f"{where}/one"))]
        for where in ("runs", "/elsewhere")
    ]
    assert names[0] == names[1]
    other = expand(LAB, STRONG, Ground(), quick=True, recorded=_anything("runs/two"))
    assert names[0] != [cell.name for cell in other]


class _anything(dict[tuple[str, int], str]):
    """Recorded at any batch, in one folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: tuple[str, int]) -> str:
        return self._folder


def test_settings_from_outside_reach_every_stage() -> None:
    study = LAB.with_settings({"data": "imdb-wiki", "data_dir": "faces"})
    for quick in (True, False):
        cells = [cell for stage in study.stage for cell in expand(study, stage, Ground(), quick=quick)]
        assert {(cell.plan.data, cell.plan.data_dir) for cell in cells} == {("imdb-wiki", "faces")}
    assert {cell.plan.data for cell in expand(LAB, WEAK, Ground(), quick=False)} == {"synthetic-ages"}


# Costs and estimates.


def test_costs_are_those_of_the_plans_own_input() -> None:
    usual, small = load_plan(None, {"model": "vgg16"}), load_plan(None, {"model": "vgg16", "image_size": 64})
    ages = load_plan(None, {"model": "vgg16", "data": "synthetic-ages"})
    assert cost_of(usual).gradient_bytes == 4 * 138_357_544
    assert cost_of(ages).gradient_bytes == 4 * (138_357_544 - 899 * 4097)
    assert cost_of(usual).flops > 10 * cost_of(small).flops
    assert cost_of(load_plan(None, {"model": "my:net"})).guessed


def test_vgg16_on_eight_nodes_is_estimated_as_replayed() -> None:
    plan = {"model": "vgg16", "data": "synthetic-ages", "workers": 8, "global_batch": 256, "steps": 5, "threads": 1}
    point = {"workers_per_node": 1, "threads": 2}
    real = estimate(Cell("weak", "compare", load_plan(None, plan), ("ddp",), point, 1))
    slept = estimate(Cell("weak", "compare", load_plan(None, plan), ("ddp",), point, 1, replays=True))
    assert 16e9 < slept.memory_bytes < 21e9 < real.memory_bytes
    assert slept.seconds < real.seconds, "eight nodes compute at once where compute is slept"
    told = Estimate(1.0, 10**15).does_not_fit()
    assert told is not None
    assert "needs about 931323 GiB of memory" in told
    hosts = estimated_bytes(hosts=8, ranks=8, weights_bytes=0.54e9, replayed=True)
    assert hosts < 23e9 < estimated_bytes(hosts=8, ranks=8, weights_bytes=0.54e9)


# One node as the unit.


def test_nodes_of_several_workers_are_held_against_one_node() -> None:
    rows = [at("vgg16", 1, 1.0, per_node=2), at("vgg16", 4, 1.25, per_node=2), at("resnet50", 1, 9.0, per_node=2)]
    assert baseline_of(rows[1], rows) is rows[0]
    speedup, efficiency = (VALUES[name].read(rows[1], rows) for name in ("speedup", "efficiency"))
    assert speedup is not None
    assert efficiency is not None
    assert speedup.value == pytest.approx(4 / 1.25)
    assert efficiency.value == pytest.approx(0.8)


def test_strong_scaling_replays_another_batch_on_every_size_and_still_has_a_baseline() -> None:
    rows = [at("vgg16", 1, 4.0, stage="strong"), at("vgg16", 4, 2.0, stage="strong")]
    assert rows[0].point["compute"] != rows[1].point["compute"]
    assert VALUES["speedup"].text(VALUES["speedup"].read(rows[1], rows)) == "2.00"
    real = [Row("strong", {**rows[0].point, "compute": "real"}, seconds=[4.0]), rows[1]]
    assert baseline_of(rows[1], real) is None, "slept time is not held against computed time"


@pytest.mark.parametrize(("hosts", "mark"), [(1, ON_LOOPBACK), (2, ON_LINKS)])
def test_rows_of_a_replayed_cell_say_so(tmp_path: Path, hosts: int, mark: Mark) -> None:
    link = {"hosts": 2, "link": "1gbit"} if hosts > 1 else {}
    plan = load_plan(
        None, {"model": "resnet50", "compute": "replay:x", "workers": 2, "global_batch": 8, "steps": 1, **link}
    )
    run = create_run(tmp_path / "cell", kind="compare", plan=plan.replace(threads=1), label="weak")
    entry = {"label": "bucketed", "method": "bucketed", "workers": 2, "threads": 1, "seconds": [1.0]}
    run.write_summary({"rows": [entry], "marks": ["link: slow"]})
    found = rows_of(Cell("weak", "compare", plan, ("bucketed",), {"threads": 2, "nodes": 2}, 1), run.path)
    assert found[0].marks == (mark, Mark("link", "link: slow"))
    assert found[0].point["threads"] == 2, "of the recorded compute, not of the sleeping rank"
    assert found[0].figures["gradient_bytes"] == 4 * 25_557_032


# The laws.


def amdahl(share: float, *sizes: int) -> dict[int, float]:
    return {n: 1 / (share + (1 - share) / n) for n in sizes}


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_law_finds_the_share_that_made_the_numbers(share: float) -> None:
    for law, made in (
        ("amdahl", amdahl(share, 1, 2, 4, 8)),
        ("gustafson", {n: n - share * (n - 1) for n in (1, 2, 4, 8)}),
    ):
        fit = fit_law(law, made)  # type: ignore[arg-type]
        assert fit is not None
        assert fit.share == pytest.approx(share)
        assert fit.worst_deviation == pytest.approx(0, abs=1e-9)
        assert fit.interval == (pytest.approx(share), pytest.approx(share))
        assert not fit.poor
        assert fit.speedup(4) == pytest.approx(made[4])


def test_a_law_has_bounds_and_says_where_it_does_not_hold() -> None:
    slower = fit_law("amdahl", {1: 1.0, 2: 0.8, 4: 0.5})
    assert slower is not None
    assert (slower.share, slower.limit, slower.poor) == (1.0, 1.0, True)
    assert "no serial share fits (the closest, 100%, is off by up to 50%)" in describe(slower)
    faster = fit_law("gustafson", {1: 1.0, 2: 2.2, 4: 4.3})
    assert faster is not None
    assert (faster.share, faster.limit, faster.interval) == (0.0, None, None)
    assert fit_law("amdahl", {1: 1.0, 2: 1.5}) is None, "any law goes through one point"
    noisy = fit_law("amdahl", {n: one * (1.05 if n == 4 else 1) for n, one in amdahl(0.2, 1, 2, 4, 8).items()})
    assert noisy is not None
    assert noisy.interval is not None
    assert noisy.interval[0] < noisy.share < noisy.interval[1]
    assert not noisy.poor
    assert "the speed-up stays below" in describe(noisy)


def strong(model: str, times: dict[int, float]) -> list[Row]:
    return [at(model, n, seconds, stage="strong") for n, seconds in times.items()]


def test_the_laws_are_told_for_each_model_and_doubted_where_they_fail() -> None:
    lawful = strong("resnet50", {n: 4 / one for n, one in amdahl(0.25, 1, 2, 4, 8).items()})
    growing = strong("vgg16", {1: 4.0, 2: 3.0, 4: 4.0, 8: 8.0})
    said = OWN["laws"]([*lawful, *growing], {"weak": [at("resnet50", n, 1.0 + 0.01 * n) for n in (1, 2, 4)]})
    assert "Amdahl, resnet50: 25.0% (25% to 25%) of the step is serial" in said
    assert "however many nodes there are, the speed-up stays below 4.0" in said
    assert "Amdahl, vgg16: no serial share fits" in said
    assert "Gustafson, resnet50: 3.7% of the step is serial" in said
    assert OWN["laws"](lawful[:2], {}).startswith("Not answered")


def test_a_table_has_one_line_of_a_law_for_each_model() -> None:
    rows = strong("resnet50", {n: 4 / one for n, one in amdahl(0.25, 1, 2, 4, 8).items()})
    values = ["amdahl_share", "amdahl_limit", "amdahl_deviation"]
    table = build_table(Table(title="t", stage="strong", rows=["model", "method"], values=values), rows)
    assert [line[:2] for line in table.rows] == [["resnet50", "bucketed"]]
    assert table.numbers[0][2:4] == [pytest.approx(0.25), pytest.approx(4.0)]


def test_a_figure_draws_the_law_in_the_colour_of_its_line() -> None:
    from syncline.report.plots import plot

    spec = Figure(
        title="F", kind="lines", stage="strong", x="nodes", series=["model"], values=["speedup"], fit="amdahl"
    )
    rows = strong("vgg16", {1: 4.0, 2: 2.5, 4: 2.0}) + strong("resnet50", {1: 4.0, 2: 2.0, 4: 1.0})
    figure = build_figure(spec, rows)
    assert figure is not None
    assert figure.note == "Dashed: Amdahl's law."
    assert [one.name for one in figure.series] == ["vgg16", "resnet50", "vgg16, Amdahl", "resnet50, Amdahl"]
    assert "Amdahl:" not in figure.text, "words are of what was measured"
    drawn = plot(figure)
    colours = [trace["line"]["color"] for trace in drawn["data"][:4]]
    assert colours[:2] == colours[2:]
    assert drawn["layout"]["xaxis"]["tickvals"] == [1, 2, 4]


# Which model, and why.

FEW = {"gradient_bytes": 100e6, "flops_per_sample": 100e9}
MANY = {"gradient_bytes": 500e6, "flops_per_sample": 50e9}


def pair(light: float, heavy: float, **more: Any) -> list[Row]:
    """Two models on 1 and 8 nodes: one that sends little for what it computes, one that sends much."""
    return [
        at("light", 1, 1.0, figures=FEW), at("heavy", 1, 1.0, figures=MANY),
        at("light", 8, light, figures=FEW, parts={"forward": more.get("light_s", 1.0)}),
        at("heavy", 8, heavy, figures=MANY, parts={"forward": more.get("heavy_s", 1.0)}),
    ]  # fmt: skip


def test_the_model_that_scales_best_is_named_and_explained() -> None:
    said = OWN["scales-best"](pair(1.25, 2.5), {})
    assert said.startswith(
        "On 8 nodes light scales best: 6.40 times one node, an efficiency of 80%; heavy reaches 3.20 times, 40%."
    )
    assert "They rank as their bytes of gradients per GFLOP do, light 62.5 kB, heavy 625.0 kB" in said


def test_an_order_that_bytes_do_not_explain_is_said_so() -> None:
    said = OWN["scales-best"](pair(2.5, 1.25), {})
    assert said.startswith("On 8 nodes heavy scales best")
    assert "do not explain this order" in said
    assert "heavy sends 625.0 kB per GFLOP and light 62.5 kB, yet heavy scales better." in said
    assert "The order is that of" not in said
    timed = OWN["bytes-against-flops"](pair(2.5, 1.25, light_s=0.1, heavy_s=10.0), {})
    assert "bytes per second of compute do explain it (heavy 50 MB/s, light 1000 MB/s)" in timed


def test_equal_models_have_no_best_one() -> None:
    said = OWN["scales-best"](pair(1.25, 1.251), {})
    assert said.startswith("On 8 nodes no model scales better than another: light 80%, heavy 80%.")
    assert "do not separate them" in said
    assert OWN["scales-best"](pair(1.25, 2.5)[::2], {}).startswith("Not answered")
    assert OWN["bytes-against-flops"](pair(1.25, 2.5)[:2], {}).startswith("Not answered")
    third = [at("third", 1, 1.0, figures=MANY), at("third", 8, 1.25, figures=MANY)]
    assert "light scales best (no measurable difference from third)" in OWN["scales-best"](
        [*pair(1.25, 2.5), *third], {}
    )
    bare = [at("a", 1, 1.0), at("a", 2, 1.0), at("b", 1, 1.0), at("b", 2, 2.0)]
    assert "is not known" in OWN["scales-best"](bare, {})


def test_models_are_compared_on_the_largest_size_that_all_reached() -> None:
    rows = [*pair(1.25, 2.5)[:3], at("heavy", 4, 1.0, figures=MANY), at("light", 4, 2.0, figures=FEW)]
    assert OWN["scales-best"](rows, {}).startswith("On 4 nodes heavy scales best")


def test_each_model_is_told_weak_and_strong() -> None:
    said = OWN["scaling-by-model"](pair(1.25, 16.0), {"strong": strong("light", {1: 4.0, 8: 2.0})})
    assert "light: 6.40 times one node on 8 nodes at one batch per node (weak), 80%; 2.00 times" in said
    assert "on 8 nodes at one global batch (strong), 25%." in said
    assert "heavy: 0.50 times one node on 8 nodes at one batch per node (weak), 6%, which does not pay off." in said
    assert OWN["scaling-by-model"]([], {}).startswith("Not answered")


def test_the_best_of_the_sweeps_are_named() -> None:
    def swept(seconds: float, **point: Any) -> Row:
        return Row("s", {"model": "vgg16", "method": "bucketed", "global_batch": 8, **point}, seconds=[seconds] * 3)

    two = [swept(1.0, workers_per_node=2, threads=1), swept(2.0, workers_per_node=1, threads=2)]
    assert "processes x threads 2 x 1, 8 samples/s; 1 x 2 gives 4" in ANSWERS["best-processes"](two, {})
    assert ANSWERS["best-processes"](two[:1], {}).startswith("Not answered")
    batches = [swept(1.0, batch_per_node=4, global_batch=4), swept(1.5, batch_per_node=8)]
    assert "batch per node 8, 5.333 samples/s; 4 gives 4" in ANSWERS["best-node-batch"](batches, {})
    assert ANSWERS["best-node-batch"](batches[:1], {}).startswith("Not answered")


def test_doubts_name_the_model_where_there_are_several() -> None:
    rows = pair(0.9, 2.5)
    spec = Table(title="t", stage="weak", rows=["model", "nodes"], values=["efficiency"])
    warnings = build_table(spec, rows).warnings
    assert next(one.text for one in warnings if one.rule == "efficiency").startswith(
        "light with bucketed on 8 workers: 111%"
    )


def test_a_mark_of_all_rows_stands_below_the_table_once() -> None:
    spec = Table(title="t", stage="weak", rows=["model", "nodes"], values=["step"])
    alike = [at("vgg16", 1, 1.0, marks=(REPLAYED,)), at("vgg16", 2, 1.0, marks=(ON_LINKS,))]
    assert (build_table(spec, alike).marks, build_table(spec, alike).warnings) == ([ON_LINKS.text], [])
    some = build_table(spec, [alike[0], at("vgg16", 2, 1.0)])
    assert [one.rule for one in some.warnings] == ["unreal time"], "it is said which rows it concerns"


def test_a_fit_of_no_known_law_is_refused() -> None:
    from syncline.errors import PlanError

    text = 'title = "T"\nquestion = "Q"\nanswer = "laws"\nanswer_stage = "a"\n[[stage]]\nname = "a"\n'
    with pytest.raises(PlanError, match="amdahl"):
        parse_study(text + '[[figure]]\ntitle = "F"\nkind = "lines"\nstage = "a"\nfit = "moore"\n', "x")
