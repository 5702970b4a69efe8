"""Studies: the file, its cells, and what tables, figures and sentences say of made-up results."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.errors import PlanError
from syncline.study.answering import ANSWERS
from syncline.study.cell_rows import best_points
from syncline.study.cells import Ground, expand
from syncline.study.figures import build_figure
from syncline.study.file import Figure, Study, Table, load_study, parse_study
from syncline.study.lab_code import LABS, built_in_labs, load_answers
from syncline.study.rows import Quantity, Row, baseline_of, pooled
from syncline.study.runner import OPEN, study_contents
from syncline.study.tables import build_table
from syncline.study.values import VALUES

SMALL = """
title = "T"
question = "Q?"
answer = "fastest"
answer_stage = "one"
[plan]
model = "mlp"
data = "synthetic"
[quick]
steps = 2
[[stage]]
name = "one"
methods = ["single", "ddp"]
grid = { nodes = [1, 2, 4] }
plan = { batch_per_worker = 8, epochs = 3 }
[stage.quick]
grid = { nodes = [1, 2] }
"""

ALL = {**ANSWERS, **load_answers(LABS / "cs744"), **load_answers(LABS / "ddp-paper")}


def row(method: str, workers: int, *seconds: float, **more: Any) -> Row:
    point = {"method": method, "workers": workers, "global_batch": 8 * workers, "batch_per_worker": 8, "threads": 1}
    return Row("s", {**point, **more.pop("point", {})}, seconds=seconds, **more)


# The file.


@pytest.mark.parametrize("name", built_in_labs())
def test_every_lab_can_be_expanded_quick_and_whole(name: str) -> None:
    _, study = load_study(name)
    for quick in (True, False):
        cells = [cell for stage in study.stage for cell in expand(study, stage, Ground(), quick=quick)]
        assert len({cell.name for cell in cells}) == len(cells) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[plan]", "[plam]"), "unknown key 'plam'"),
        (('name = "one"', 'nam = "one"'), "stage.0.nam"),
        (('answer_stage = "one"', 'answer_stage = "two"'), "unknown stage 'two'"),
        (('answer = "fastest"', 'answer = "best"'), "unknown answer 'best'; choose one of fastest, "),
        (("nodes = [1, 2, 4]", "nodes = []"), "grid key nodes has no values"),
        (('title = "T"', "title = "), "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(change: tuple[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_study(SMALL.replace(*change), "small.toml")


def test_a_plan_that_cannot_be_names_its_stage() -> None:
    study = parse_study(SMALL.replace('model = "mlp"', 'model = "mpl"'), "small.toml")
    with pytest.raises(PlanError, match=r"stage one: .*mlp"):
        expand(study, study.stage[0], Ground(), quick=False)


def test_unknown_values_and_later_stages_are_refused() -> None:
    table = '\n[[table]]\ntitle = "t"\nstage = "one"\nvalues = ["stepp"]\n'
    with pytest.raises(PlanError, match="unknown value 'stepp'; choose one of step, "):
        parse_study(SMALL + table, "x")
    later = '\n[[stage]]\nname = "two"\nbest_of = { stage = "two", keys = ["threads"] }\n'
    with pytest.raises(PlanError, match="best_of must name an earlier stage, not 'two'"):
        parse_study(SMALL + later, "x")


def test_there_is_no_lab_of_that_name() -> None:
    with pytest.raises(PlanError, match="'cs745' is neither a lab nor a file"):
        load_study("cs745")


# Cells.


def test_nodes_and_batch_per_worker_become_workers_and_global_batch() -> None:
    study = parse_study(SMALL, "x")
    cells = expand(study, study.stage[0], Ground(), quick=False)
    assert [(cell.plan.workers, cell.plan.global_batch, cell.plan.epochs) for cell in cells] == [
        (1, 8, 3),
        (2, 16, 3),
        (4, 32, 3),
    ]
    assert cells[0].methods == ("single", "ddp")
    assert cells[1].methods == ("ddp",), "the baseline of weak scaling is the one-worker cell"


def test_quick_replaces_grid_and_length() -> None:
    study = parse_study(SMALL.replace("[quick]", "[quick]\nseed = 1"), "x")
    stage = study.stage[0]
    quick = expand(study, stage, Ground(), quick=True)
    assert [cell.plan.workers for cell in quick] == [1, 2]
    assert quick[0].plan.epochs == 3, "the stage's own length wins over the study's quick one"
    assert quick[0].plan.seed == 1


def test_emulated_hosts_leave_out_what_is_larger() -> None:
    study = parse_study(SMALL, "x")
    cells = expand(study, study.stage[0], Ground(2, "1gbit"), quick=False)
    assert [(cell.plan.workers, cell.plan.hosts, cell.plan.link) for cell in cells] == [
        (1, 1, None),
        (2, 2, "1gbit"),
    ]


def test_a_stage_may_vary_the_link() -> None:
    varied = 'grid = { nodes = [1, 2], link = ["1gbit", "100mbit"] }'
    study = parse_study(SMALL.replace("grid = { nodes = [1, 2, 4] }", varied), "x")
    cells = expand(study, study.stage[0], Ground(hosts=2, link="10gbit"), quick=False)
    assert [(cell.plan.hosts, cell.plan.link) for cell in cells] == [
        (1, None), (1, None), (2, "1gbit"), (2, "100mbit"),
    ]  # fmt: skip
    here = expand(study, study.stage[0], Ground(), quick=False)
    assert [cell.why_not is not None for cell in here] == [False, False, True, True], (
        "loopback is no link of that rate"
    )


def test_what_is_for_one_host_is_left_out_on_several_with_a_reason() -> None:
    _, study = load_study("cs744")
    by_name = {stage.name: stage for stage in study.stage}
    several = [*by_name["train"].methods, "shared-memory"]
    train = by_name["train"].model_copy(update={"loopback": False, "methods": several})
    cells = expand(study, train, Ground(4, "1gbit"), quick=False)
    assert {cell.plan.method for cell in cells if cell.why_not is None} >= {"gather-scatter", "ddp", "bucketed"}
    (left_out,) = [cell for cell in cells if cell.why_not is not None]
    assert left_out.point["method"] == "shared-memory"
    assert left_out.why_not == "method shared-memory runs on one host only"
    assert not [cell for cell in expand(study, train, Ground(), quick=False) if cell.why_not]
    timed = by_name["nodes"].model_copy(update={"methods": ["ddp", "shared-memory"], "alone": []})
    both = expand(study, timed, Ground(4, "1gbit"), quick=False)
    there = [cell for cell in both if cell.point["nodes"] == 2]
    assert [(cell.plan.method, cell.why_not is None) for cell in there] == [("ddp", True), ("shared-memory", False)]
    assert there[0].methods == ("ddp",)
    alone = train.model_copy(update={"methods": ["shared-memory"]})
    assert [cell.why_not is None for cell in expand(study, alone, Ground(4, "1gbit"), quick=False)] == [False]


def test_the_name_changes_with_the_plan_and_only_with_it() -> None:
    study, other = parse_study(SMALL, "x"), parse_study(SMALL.replace("epochs = 3", "epochs = 4"), "x")
    names = [cell.name for cell in expand(study, study.stage[0], Ground(), quick=False)]
    assert names == [cell.name for cell in expand(study, study.stage[0], Ground(), quick=False)]
    assert not set(names) & {cell.name for cell in expand(other, other.stage[0], Ground(), quick=False)}


def test_a_later_stage_takes_the_best_of_an_earlier_one() -> None:
    text = SMALL + (
        '\n[[stage]]\nname = "two"\nmethods = ["ddp"]\ngrid = { global_batch = [64] }\n'
        'best_of = { stage = "one", keys = ["nodes"] }\n'
    )
    study = parse_study(text, "x")
    rows = [row("ddp", 2, 1.0, point={"nodes": 2}), row("ddp", 4, 9.0, point={"nodes": 4})]
    best = best_points(study.stage[1], rows)
    assert best == {(): {"nodes": 2}}
    cells = expand(study, study.stage[1], Ground(), quick=False, best=best)
    assert [cell.plan.workers for cell in cells] == [2]
    assert expand(study, study.stage[1], Ground(), quick=False)[0].plan.workers == 1, "before it ran: the first"


# Rows and values.


def test_rounds_are_pooled() -> None:
    rows = pooled([row("ddp", 2, 1.0, parts={"wire": 0.2}), row("ddp", 2, 3.0, parts={"wire": 0.4})])
    assert len(rows) == 1
    assert list(rows[0].seconds) == [1.0, 3.0]
    assert rows[0].parts["wire"] == pytest.approx(0.3)


def test_speed_up_is_against_one_worker_of_the_same_batch() -> None:
    rows = [row("single", 1, 1.0), row("ddp", 2, 1.25), row("single", 1, 0.1, point={"threads": 2})]
    speedup, efficiency = VALUES["speedup"].read(rows[1], rows), VALUES["efficiency"].read(rows[1], rows)
    assert speedup == Quantity(1.6)
    assert efficiency == Quantity(0.8)
    strong = [
        Row("s", {"method": "single", "workers": 1, "global_batch": 64}, seconds=[4.0]),
        Row("s", {"method": "single", "workers": 1, "global_batch": 32}, seconds=[2.0]),
        Row("s", {"method": "ddp", "workers": 4, "global_batch": 64}, seconds=[2.0]),
    ]
    assert VALUES["speedup"].read(strong[2], strong) == Quantity(2.0)
    assert baseline_of(row("ddp", 2, 1.0), [row("ddp", 2, 1.0)]) is None


def test_one_worker_on_all_cores_is_no_speed_up() -> None:
    rows = [row("single", 1, 1.0), row("single, all cores", 1, 0.5, point={"threads": 2}), row("ddp", 2, 1.5)]
    assert VALUES["speedup"].read(rows[1], rows) is None
    assert VALUES["speedup"].read(rows[2], rows) is not None


def test_values_that_were_not_measured_are_none() -> None:
    bare = Row("s", {"method": "ddp", "workers": 2, "global_batch": 8})
    assert all(value.read(bare, [bare]) is None for value in VALUES.values())
    assert VALUES["step"].text(None) == "-"


def test_shares_and_overlap_come_from_the_parts() -> None:
    parts = {"forward": 0.2, "backward": 0.4, "wire": 0.3, "wait": 0.1, "hidden": 0.6}
    one = row("ddp", 2, 1.0, parts=parts)
    assert VALUES["communication_share"].read(one, [one]) == Quantity(pytest.approx(0.4))
    assert VALUES["overlap"].read(one, [one]) == Quantity(pytest.approx(0.6 / 0.9))
    assert VALUES["compute"].read(one, [one]) == Quantity(pytest.approx(0.6))


# Tables and figures.


def test_a_table_has_a_line_for_each_method_and_a_column_for_each_size() -> None:
    rows = [row("single", 1, 1.0), row("ddp", 1, 1.1), row("ddp", 2, 1.5), row("ddp", 2, 9.0, point={"threads": 7})]
    spec = Table(title="t", stage="s", columns=["workers"], values=["step"], where={"threads": 1})
    table = build_table(spec, rows)
    assert table.columns == ["method", "1 worker", "2 workers"]
    assert table.rows == [["single", "1.00 ±0.00 s", "-"], ["ddp", "1.10 ±0.00 s", "1.50 ±0.00 s"]]
    assert table.numbers == [[None, 1.0, None], [None, 1.1, 1.5]]
    assert table.num_keys == 1
    assert table.baseline == "single"


def test_a_table_has_no_empty_columns() -> None:
    rows = [row("single", 1, 1.0, point={"nodes": 1}), row("ddp", 2, 1.25, point={"nodes": 2})]
    table = build_table(
        Table(title="t", stage="s", columns=["nodes"], values=["step", "throughput", "overlap"]), rows
    )
    assert table.columns == ["method", "step, 1 node", "step, 2 nodes", "samples/s, 1 node", "samples/s, 2 nodes"]


def test_a_table_doubts_an_efficiency_above_one() -> None:
    rows = [row("single", 1, *[1.0] * 5), row("ddp", 2, *[0.9] * 5)]
    table = build_table(Table(title="t", stage="s", values=["efficiency"], rows=["method", "workers"]), rows)
    assert [one.rule for one in table.warnings] == ["efficiency"]
    rows = [row("single", 1, *[1.0] * 5), row("ddp", 2, *[1.1] * 5)]
    assert build_table(Table(title="t", stage="s", values=["efficiency"]), rows).warnings == []


def test_a_figure_sorts_its_numbers_and_says_itself_in_words() -> None:
    rows = [row("ddp", 4, 1.0), row("ddp", 2, 2.0), row("single", 1, 1.0)]
    spec = Figure(title="F", kind="lines", stage="s", x="workers", series=["method"], values=["step"])
    figure = build_figure(spec, rows)
    assert figure is not None
    assert [(one.name, one.x, one.y) for one in figure.series] == [
        ("ddp", [2, 4], [2.0, 1.0]),
        ("single", [1], [1.0]),
    ]
    assert figure.text == "F: step against workers. ddp: 2 2.00 s, 4 1.00 s. single: 1 1.00 s."
    assert build_figure(spec, []) is None


def test_a_series_of_numbers_says_what_it_counts() -> None:
    rows = [row("ddp", 1, 1.0), row("ddp", 2, 2.0)]
    figure = build_figure(Figure(title="F", kind="bars", stage="s", series=["workers"], values=["step"]), rows)
    assert figure is not None
    assert [one.name for one in figure.series] == ["1 worker", "2 workers"]
    both = ["workers_per_node", "threads"]
    rows = [row("ddp", 2, 1.0, point={"workers_per_node": 1, "threads": 2})]
    figure = build_figure(Figure(title="F", kind="bars", stage="s", series=both, values=["step"]), rows)
    assert figure is not None
    assert figure.series[0].name == "1 process per node, 2 threads"


def test_a_loss_figure_has_a_line_for_each_run() -> None:
    rows = [row("ddp", 2, 1.0, figures={"losses": [{"step": 20, "loss": 2.0}, {"step": 40, "loss": 1.5}]})]
    figure = build_figure(Figure(title="L", kind="loss", stage="s"), rows)
    assert figure is not None
    assert (figure.series[0].x, figure.series[0].y) == ([20, 40], [2.0, 1.5])


def test_a_loss_table_has_a_line_for_each_run_and_rank() -> None:
    noted = [{"step": 20, "loss": 2.0, "by_rank": [1.5, 2.5]}, {"step": 40, "loss": 1.0, "by_rank": [1.0, None]}]
    table = build_table(Table(title="t", kind="losses", stage="s"), [row("ddp", 2, figures={"losses": noted})])
    assert table.columns == ["method", "rank", "step 20", "step 40"]
    assert table.rows == [["ddp", "0", "1.5000", "1.0000"], ["ddp", "1", "2.5000", "-"]]
    assert table.numbers[1] == [None, None, 2.5, None]
    with pytest.raises(ValueError, match="needs values"):
        Table(title="t", stage="s")


def test_times_are_drawn_step_by_step() -> None:
    figure = build_figure(Figure(title="T", kind="times", stage="s"), [row("ddp", 2, 0.5, 0.7), row("single", 1)])
    assert figure is not None
    assert [(one.name, one.x, one.y) for one in figure.series] == [("ddp", [1, 2], [0.5, 0.7])]


def test_an_axis_of_several_values_is_called_time_only_if_they_are_times() -> None:
    rows = [row("ddp", 2, 1.0, parts={"wire": 0.1}, figures={"epochs": [{"train_loss": 2.0, "test_loss": 2.1}]})]
    for values, label in ((["step", "wire"], "time"), (["train_loss", "test_loss"], "loss")):
        figure = build_figure(Figure(title="F", kind="bars", stage="s", values=values), rows)
        assert figure is not None
        assert figure.y_label == label


def test_without_answers_the_questions_stay_open() -> None:
    _, study = load_study("cs744")
    contents = study_contents(study, [], {}, answers=False)
    assert contents.answer == OPEN
    assert {answer for _, answer in contents.asks} == {OPEN}


# Computed sentences: with data that makes them true, and data that makes them false.

STEADY = (1.0, 1.0, 1.0)


def test_the_fastest_method_is_named_with_its_gain() -> None:
    rows = [row("single", 1, *STEADY), row("ddp", 4, 1.6, 1.6, 1.6), row("gather-scatter", 4, 4.0, 4.0, 4.0)]
    said = ALL["fastest"](rows, {})
    assert said.startswith(
        "On 4 workers ddp is fastest; gather-scatter takes 2.50 ±0.00 times as long as ddp. "
        "ddp takes 1.60 ±0.00 s a step."
    )
    assert "2.50 times as many samples a second as one worker, an efficiency of 62%." in said
    slower = [row("single", 1, *STEADY), row("ddp", 4, 5.0, 5.0, 5.0)]
    assert "It does not pay off." in ALL["fastest"](slower, {})
    close = [row("ddp", 4, 1.0, 1.6, 2.0), row("bucketed", 4, 1.1, 1.5, 2.0)]
    assert "no difference between ddp and bucketed" in ALL["fastest"](close, {})
    assert ALL["fastest"]([row("single", 1, 1.0)], {}).startswith("Not answered")


def test_why_the_root_is_slow_is_said_only_if_it_is() -> None:
    slow = [
        row("gather-scatter", 4, 3.0, 3.0, 3.0, parts={"wire": 2.0, "forward": 1.0}),
        row("all-reduce", 4, *STEADY),
    ]
    said = ALL["root-exchange"](slow, {})
    assert "Rank 0's link carries 6 times the gradients" in said
    assert "1.50 times for each rank" in said
    assert "3.0 times as long" in said
    assert "67% of the step on communication" in said
    same = [row("gather-scatter", 4, *STEADY), row("all-reduce", 4, *STEADY)]
    assert "here the link is not the bottleneck" in ALL["root-exchange"](same, {})
    assert ALL["root-exchange"]([row("ddp", 2, 1.0)], {}).startswith("Not answered")


def test_what_bucketing_gains_is_said_only_if_it_gains() -> None:
    gain = [row("all-reduce", 2, 2.0, 2.0), row("ddp", 2, 1.5, 1.5, parts={"wire": 0.1, "hidden": 0.3})]
    assert "ddp saves 500 ms of 2.00 ±0.00 s a step (25%); it hides 75%" in ALL["bucketing"](gain, {})
    loss = [row("all-reduce", 2, 1.0, 1.0), row("ddp", 2, 1.5, 1.5)]
    assert ALL["bucketing"](loss, {}).startswith("Nothing here")
    same = [row("all-reduce", 2, 1.0, 1.5, 2.0), row("ddp", 2, 1.1, 1.5, 1.9)]
    assert ALL["bucketing"](same, {}).startswith("Nothing that this run can show")


def test_why_losses_differ_needs_certificates() -> None:
    def ended(method: str, loss: float) -> Row:
        return row(method, 2, figures={"losses": [{"step": 1, "loss": loss}]})

    good = row("ddp", 2, figures={"passed": True, "sequential": {"status": "order"}})
    exact = row("gather-scatter", 2, figures={"passed": True, "sequential": {"status": "bitwise"}})
    bad = row("ddp", 2, figures={"passed": False})
    rows = [ended("ddp", 2.5), ended("gather-scatter", 2.501)]
    said = ALL["losses-differ"](rows, {"c": [good, exact]})
    assert "Between methods the last losses differ by 0.001 (ddp 2.5000, gather-scatter 2.5010)" in said
    assert "All 2 certificates hold" in said
    assert "1 of them bit for bit" in said
    assert "the others" not in ALL["losses-differ"](rows, {"c": [exact]})
    on_four = [
        row(name, 4, figures={"losses": [{"step": 1, "loss": loss}]}) for name, loss in (("ddp", 2.5), ("tree", 2.6))
    ]
    said = ALL["losses-differ"](on_four, {"c": [exact]})
    assert "bit for bit on 2 workers. On 4 the methods add the same numbers in another order" in said
    assert "certificate of ddp failed" in ALL["losses-differ"](rows, {"c": [bad]})
    assert "No certificate" in ALL["losses-differ"](rows, {})
    assert ALL["losses-differ"]([ended("ddp", 2.5), ended("all-reduce", 2.5)], {}).startswith(
        "Between methods they do not"
    )


def test_scaling_sentences() -> None:
    rows = [row("single", 1, 1.0), row("ddp", 2, 1.25, parts={"wire": 0.25, "forward": 1.0})]
    assert "1.60 times as many" in ALL["scaling"](rows, {})
    assert "Exposed communication is 20% of the step" in ALL["scaling"](rows, {})
    assert ALL["scaling"](rows[:1], {}).startswith("Not answered")
    assert "(strong): 80% with ddp" in ALL["weak-and-strong"](rows, {})
    assert "(weak): 80% with ddp" in ALL["weak-and-strong"](rows, {"weak": rows})
    assert ALL["weak-and-strong"](rows[:1], {}).startswith("Not answered")


def test_study_is_frozen() -> None:
    study: Study = parse_study(SMALL, "x")
    with pytest.raises(ValueError, match="frozen"):
        study.title = "other"


def swept(value: Any, *seconds: float, key: str = "options.bucket_cap_mb", **more: Any) -> Row:
    return row("ddp", 2, *seconds, point={key: value, "model": "vgg11", **more.pop("point", {})}, **more)


def test_the_best_value_of_a_sweep_is_named() -> None:
    rows = [swept(1, 2.0, 2.0), swept(25, 1.0, 1.0), swept(50, 1.0, 1.0)]
    said = ALL["best-bucket"](rows, {})
    assert said.startswith(
        "vgg11 with ddp: bucket size in MB 25 (no measurable difference from 50), 16 samples/s; 1 gives 8, "
        "2.00 ±0.00 times as long for each sample."
    )
    flat = [swept(1, 1.0, 1.5, 2.0), swept(25, 1.0, 1.5, 2.0)]
    assert "bucket size in MB makes no measurable difference" in ALL["best-bucket"](flat, {})
    assert ALL["best-bucket"](rows[:1], {}).startswith("Not answered")


def test_what_overlap_gains() -> None:
    key = "options.overlap"
    assert "overlap saves 500 ms of 2.00 s a step (25%)" in ALL["overlap"](
        [swept(True, 1.5, 1.5, key=key), swept(False, 2.0, 2.0, key=key)], {}
    )
    assert "overlap costs 500 ms" in ALL["overlap"](
        [swept(True, 2.0, 2.0, key=key), swept(False, 1.5, 1.5, key=key)], {}
    )
    assert "no difference" in ALL["overlap"](
        [swept(True, 1.0, 2.0, 3.0, key=key), swept(False, 1.1, 2.0, 3.0, key=key)], {}
    )
    assert ALL["overlap"]([swept(True, 1.0, key=key)], {}).startswith("Not answered")


def test_overlap_is_held_against_the_paper() -> None:
    key, hosts = "options.overlap", {"hosts": 2}
    slow = swept(False, 2.0, 2.0, key=key, point=hosts, parts={"backward": 0.6, "wire": 1.0, "forward": 0.4})
    said = ALL["overlap"]([swept(True, 1.5, 1.5, key=key, point=hosts), slow], {})
    assert "The paper saved 21 to 38 % of a step on GPUs: the same direction." in said
    assert "At most 600 ms could hide here, all of backward." in said
    on_loopback = [swept(True, 2.0, 2.0, key=key), swept(False, 1.5, 1.5, key=key)]
    assert "this set-up cannot show it" in ALL["overlap"](on_loopback, {})
    little = swept(False, 1.5, 1.5, key=key, point=hosts, parts={"backward": 1.0, "wire": 0.05})
    assert "only 5% of a step" in ALL["overlap"]([swept(True, 2.0, 2.0, key=key, point=hosts), little], {})


def test_bucket_sizes_are_held_against_the_paper() -> None:
    rows = [swept(0.1, 1.0, 1.0), swept(25, 1.0, 1.0), swept(1000, 2.0, 2.0)]
    said = ALL["bucket-size"](rows, {})
    assert "0.1 MB costs nothing over the best, other than in the paper, because" in said
    assert "1000 MB costs 100% more (2.00 ±0.00 s), as in the paper: nothing is sent before backward ends" in said
    assert ALL["bucket-size"](rows[:1], {}).startswith("Not answered")
    hiding = {"parts": {"hidden": 0.7, "wire": 0.3}}
    rows = [swept(1, 2.0), swept(25, 1.0), swept(1000, 1.0, **hiding)]
    assert "1000 MB costs nothing over the best" in (said := ALL["bucket-size"](rows, {}))
    assert "still hides 70% behind backward" in said, "it is not that nothing was sent"


def test_what_skipping_synchronisation_gives_and_costs() -> None:
    def skipping(every: int, seconds: float, loss: float) -> Row:
        figures = {"epochs": [{"train_loss": loss}]}
        return swept(every, seconds, key="accumulate", figures=figures, point={"global_batch": 16 * every})

    said = ALL["skipped-synchronisation"]([skipping(1, 1.0, 2.0), skipping(8, 4.0, 2.2)], {})
    assert "once in 8 backward passes instead of once in 1 gives 2.00 times the samples a second" in said
    assert "loss is 2.200 instead of 2.000" in said
    better = ALL["skipped-synchronisation"]([skipping(1, 1.0, 2.0), skipping(8, 4.0, 1.9)], {})
    assert "no worse" in better
    assert ALL["skipped-synchronisation"]([skipping(1, 1.0, 2.0)], {}).startswith("Not answered")


def test_a_stage_replays_what_an_earlier_one_recorded() -> None:
    text = SMALL + '\n[[stage]]\nname = "far"\nmethods = ["ddp"]\nreplay = "one"\ngrid = { nodes = [2, 8] }\n'
    study = parse_study(text.replace("batch_per_worker = 8, epochs = 3", "batch_per_worker = 8, steps = 3"), "x")
    study = study.model_copy(update={"plan": {**study.plan, "batch_per_worker": 8}})
    cells = expand(study, study.stage[1], Ground(), quick=False, recorded={("mlp", 8): "runs/a"})
    assert {cell.plan.compute for cell in cells} == {"replay:runs/a"}
    missing = expand(study, study.stage[1], Ground(), quick=False, recorded={("mlp", 4): "runs/a"})
    assert {cell.why_not for cell in missing} == {"stage one recorded no mlp at 8 samples per worker (recorded: 4)"}
