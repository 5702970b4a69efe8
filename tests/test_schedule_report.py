"""`syncline schedule`: rounds as text, a drawing that is valid and complete, and words that are refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from conftest import Cli

from syncline.collectives.patterns import PATTERNS, make_schedule
from syncline.collectives.schedule import Schedule
from syncline.report.schedules import COLORS, schedule_svg, schedule_text

SVG = "{http://www.w3.org/2000/svg}"


def arrows(drawing: ET.Element) -> list[ET.Element]:
    return [line for line in drawing.iter(f"{SVG}line") if "marker-end" in line.attrib]


def pairs(schedule: Schedule) -> list[tuple[int, int, int, str]]:
    """Every (round, source, target, op): one arrow each, however many chunks travel."""
    found = [
        (number, transfer.source, transfer.target, transfer.op)
        for number, transfers in enumerate(schedule.rounds)
        for transfer in transfers
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_drawing_is_xml_with_an_arrow_per_pair_and_a_line_per_rank(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    drawing = ET.fromstring(schedule_svg(schedule))
    texts = ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]
    expected = pairs(schedule)
    assert len(arrows(drawing)) == len(expected)
    assert [arrow.get("stroke") for arrow in arrows(drawing)] == [COLORS[op] for *_, op in expected]
    assert [text for text in texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(world_size)]
    assert len([text for text in texts if text.startswith("round ")]) == len(schedule.rounds)
    assert drawing.find(f"{SVG}title") is not None


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_everything_is_drawn_inside_the_page_and_from_source_to_target(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    drawing = ET.fromstring(schedule_svg(schedule))
    width, height = float(drawing.get("width", 0)), float(drawing.get("height", 0))
    lines = [line for line in drawing.iter(f"{SVG}line") if "marker-end" not in line.attrib]
    rank_of = {line.get("y1"): rank for rank, line in enumerate(lines)}
    drawn = [(rank_of[arrow.get("y1")], rank_of[arrow.get("y2")]) for arrow in arrows(drawing)]
    assert drawn == [(source, target) for _, source, target, _ in pairs(schedule)]
    for arrow in arrows(drawing):
        assert 0 <= float(arrow.get("x1", -1)) <= float(arrow.get("x2", -1)) <= width
        assert 0 <= float(arrow.get("y2", -1)) <= height


def test_rounds_are_printed_one_a_line() -> None:
    assert schedule_text(make_schedule("root", 3)).splitlines() == [
        "root on 3 ranks: 1 chunks, 2 rounds; the busiest rank sends 2 x the buffer",
        "source>target:chunk, + adds, = replaces",
        "round 0: 1>0:0+  2>0:0+",
        "round 1: 0>1:0=  0>2:0=",
    ]


def test_verb_prints_the_rounds_and_draws_them(cli: Cli, tmp_path: Path) -> None:
    done = cli("schedule", "ring", "--workers", "4")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "ring on 4 ranks: 4 chunks, 6 rounds; the busiest rank sends 1.5 x the buffer"
    assert [line.split(":")[0] for line in lines if line.startswith("round ")] == [f"round {n}" for n in range(6)]
    assert "drawn in ring-4.svg" in lines[-1]
    assert len(arrows(ET.parse(tmp_path / "work" / "ring-4.svg").getroot())) == 24


def test_drawing_goes_where_asked(cli: Cli, tmp_path: Path) -> None:
    assert cli("schedule", "tree", "-o", "mine.svg").returncode == 0
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.svg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rign"], ["'rign'", *PATTERNS]),
        (["ring", "--workers", "0"], ["--workers 0", "1 to 64"]),
        (["ring", "--workers", "65"], ["--workers 65", "1 to 64"]),
        (["ring", "-o", "missing/x.svg"], ["missing/x.svg", "No such file"]),
    ],
)
def test_wrong_words_are_refused(arguments: list[str], words: list[str], cli: Cli, tmp_path: Path) -> None:
    done = cli("schedule", *arguments)
    assert done.returncode == 2
    assert [word for word in words if word not in done.stderr] == []
    assert list((tmp_path / "work").iterdir()) == []
