"""What a reader must know first: how the quick form differs from the whole lab, and where its nodes were."""

from __future__ import annotations

import pytest

from syncline import studies
from syncline.errors import PlanError
from syncline.launcher.doctor import Finding
from syncline.study.cells import Ground, expand, most_nodes
from syncline.study.file import load_study, parse_study
from syncline.study.lab_code import built_in_labs
from syncline.study.quick_form import differences, title
from syncline.study.rows import Row
from syncline.study.runner import study_contents

LAB = """
title = "T"
question = "Q"
answer = "fastest"
answer_stage = "time"
link = "1gbit"
[plan]
model = "vgg11"
data = "cifar10"
[quick]
data = "synthetic"
[[stage]]
name = "record"
run = "train"
methods = ["single"]
plan = { nodes = 1, batch_per_worker = 8, steps = 2 }
[[stage]]
name = "time"
methods = ["single", "ddp", "bucketed"]
grid = { nodes = [1, 2, 4] }
alone = ["single"]
replay = "record"
plan = { batch_per_worker = 8, epochs = 1 }
[stage.quick]
grid = { nodes = [1, 2] }
methods = ["single", "ddp"]
plan = { batch_per_worker = 4, steps = 5, "measure.warmup" = 1 }
[[stage]]
name = "learn"
run = "train"
methods = ["ddp"]
plan = { nodes = 4, steps = 4 }
loopback = true
[stage.quick]
skip = "it takes hours"
"""


def test_the_quick_form_says_what_it_changes() -> None:
    study = parse_study(LAB, "x")
    both, time, learn = differences(study)
    assert both == "everywhere: data synthetic instead of cifar10", "what several stages share is said once"
    assert "batch per worker 4 instead of 8" in time
    assert "steps 5 instead of epochs 1" in time
    assert "nodes 1 and 2 instead of 1, 2 and 4" in time
    assert "without bucketed" in time
    assert "warm-up" not in time, "how it is measured does not make it another experiment"
    assert learn == "learn: left out, it takes hours"


def test_the_title_names_another_model_data_or_batch() -> None:
    study = parse_study(LAB, "x")
    assert title(study, quick=False) == "T"
    assert title(study, quick=True) == ("T (quick form: data synthetic instead of cifar10)")
    usual = parse_study(LAB.replace('data = "cifar10"', 'data = "auto"'), "x")
    assert "data synthetic instead of CIFAR-10" in title(usual, quick=True), "what auto stands for"
    same = parse_study(LAB.replace('data = "synthetic"', ""), "x")
    assert title(same, quick=True) == "T (quick form)"


@pytest.mark.parametrize("name", built_in_labs())
def test_no_lab_changes_model_or_data_silently(name: str) -> None:
    _, study = load_study(name)
    shown = title(study, quick=True)
    for stage in study.stage:
        quick = {**study.quick, **stage.quick.plan}
        for key in ("model", "data", "image_size"):
            if key in quick and quick[key] != {**study.plan, **stage.plan}.get(key) and not stage.quick.skip:
                assert f"{key.replace('_', ' ')} {quick[key]}" in shown


def test_synthetic_images_instead_of_cifar10_stand_in_the_title() -> None:
    study = parse_study(LAB, "x")
    row = Row(
        "time", {"method": "ddp"}, figures={"data": "Synthetic. Chosen because CIFAR-10 is not here: no network"}
    )
    assert study_contents(study, [row], {}, answers=False).title == "T, on synthetic data"
    assert study_contents(study, [], {}, answers=False).title == "T"


# Where nodes are.


def emulation(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    finding = Finding(status, "emulated hosts", "user namespaces are off")  # type: ignore[arg-type]
    monkeypatch.setattr(studies, "examine_emulation", lambda: finding)


def ground(hosts: int | None = None, link: str | None = None, loopback: bool = False) -> Ground:
    return studies.study_ground(parse_study(LAB, "x"), quick=False, hosts=hosts, link=link, loopback=loopback)


def test_nodes_are_emulated_hosts_where_the_lab_has_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation(monkeypatch, "ok")
    assert (ground().hosts, ground().link, ground().note) == (4, "1gbit", "")
    assert (ground(link="100mbit").hosts, ground(link="100mbit").link) == (4, "100mbit")
    assert (ground(hosts=2).hosts, ground(hosts=2).link) == (2, "1gbit")
    assert most_nodes(parse_study(LAB, "x"), quick=True) == 4, "a stage without a grid counts too"


def test_loopback_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation(monkeypatch, "ok")
    asked = ground(loopback=True)
    assert asked.hosts is None
    assert "no result here is about a network (--loopback)" in asked.note
    emulation(monkeypatch, "warn")
    forced = ground()
    assert forced.hosts is None
    assert "because hosts cannot be emulated here: user namespaces are off" in forced.note
    with pytest.raises(PlanError, match="contradicts"):
        ground(hosts=2, loopback=True)


def test_a_stage_may_stay_on_this_machine_and_run_less_alone() -> None:
    study = parse_study(LAB, "x")
    place = Ground(4, "1gbit")
    timed = expand(study, study.stage[1], place, quick=False, recorded={("vgg11", 8): "runs/one"})
    assert [cell.plan.hosts for cell in timed] == [1, 2, 4]
    assert [cell.methods for cell in timed] == [("single",), ("ddp", "bucketed"), ("ddp", "bucketed")]
    (learnt,) = expand(study, study.stage[2], place, quick=False)
    assert (learnt.plan.hosts, learnt.plan.workers) == (1, 4)
    with pytest.raises(PlanError, match="alone names 'ring'"):
        parse_study(LAB.replace('alone = ["single"]', 'alone = ["ring"]'), "x")
