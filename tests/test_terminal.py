"""What a terminal shows while nothing else is printed: ranks that start, what comes before the first step, and how
far a cell of a lab is."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from conftest import SYNCLINE, cli_environment, killed_at_end
from test_lab import write_study

from syncline.voice import Voice


def on_terminal(*arguments: str | Path, cwd: Path) -> str:
    """All that a terminal of 100 columns gets to see, from a command that must succeed."""
    ours, theirs = pty.openpty()
    environment = {**cli_environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [SYNCLINE, *arguments], cwd=cwd, env=environment, stdout=theirs, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = b""
    with killed_at_end(process):
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last one with the terminal open has left
                break
            shown += part
            if not part:
                break
        assert process.wait(60) == 0, shown.decode()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def in_order(words: list[str], text: str) -> bool:
    return re.search(".*".join(map(re.escape, words)), text, flags=re.S) is not None


def test_train_says_what_it_does_before_its_first_step(tmp_path: Path) -> None:
    arguments = ["train", "--model", "mlp", "--data", "synthetic", "--workers", "2", "--steps", "3"]
    shown = on_terminal(*arguments, "--global-batch", "8", "--set", "evaluate=false", cwd=tmp_path)
    phases = ["starting 2 workers", "loading data", "building mlp", "timing compute alone", "taking the first step"]
    assert in_order([*phases, "average step"], shown), shown


def test_a_lab_moves_within_a_cell(tmp_path: Path) -> None:
    shown = on_terminal("lab", write_study(tmp_path), cwd=tmp_path)
    assert in_order(
        ["[1/3] time", "starting 2 workers", "turn", "loading data", "left", "[2/3] learn", "step"], shown
    ), shown
    assert "run folder" not in shown, "cells themselves say nothing: the lab speaks for them"


def test_a_part_of_a_whole_moves_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    part = Voice("all").without_words
    part.say("x")
    part.warn("x")
    part.doing("starting")  # there is no terminal here
    assert part.has_bar
    assert not part.has_lines
    assert capsys.readouterr() == ("", "")
    assert not Voice().without_words.has_bar
