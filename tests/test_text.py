"""A text file as tokens: written back byte for byte, windows that do not depend on ranks, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli

from syncline.errors import DataError
from syncline.plan import Plan
from syncline.workload.data.made import text_batches
from syncline.workload.data.text import BYTES, FIRST, PIECE, decode, encode, learn_vocabulary, read_text
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import NO_ANSWER

LINE = "The sea, the sea! It is 3 miles wide;\n\n  and grün is its colour\tto-day. Ωμέγα \x00\r\n".encode()
WORDS = b"one two three four five six seven eight nine ten "


def test_every_byte_comes_back() -> None:
    content = LINE * 3 + bytes(range(256)) + b"   "
    pieces = PIECE.findall(content)
    assert b"".join(pieces) == content
    numbers = learn_vocabulary(pieces)
    tokens = encode(pieces, numbers)
    assert decode(tokens, numbers) == content
    assert int(tokens.min()) >= FIRST
    assert int(tokens.max()) < FIRST + BYTES + len(numbers)


def test_words_get_tokens_by_how_often_they_occur_and_rare_ones_are_spelt() -> None:
    pieces = PIECE.findall(b"b b b aa aa cc cc once bb bb bb")
    numbers = learn_vocabulary(pieces)
    assert list(numbers) == [b" bb", b" aa", b" b", b" cc"]
    assert list(numbers.values()) == [FIRST + BYTES + index for index in range(4)]
    assert encode([b" once"], numbers).tolist() == [FIRST + byte for byte in b" once"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(WORDS * 200)
    return path


def test_batches_hide_tokens_of_consecutive_windows(book: Path) -> None:
    plan = Plan(model="bert-small", data="text", data_dir=str(book), sequence_length=20)
    batches = text_batches(plan)
    assert (batches.num_train, batches.num_test) == (90, 10)
    assert batches.task.num_classes == FIRST + BYTES + len(WORDS.split()) + 0
    shard = next(Sharding(90, 9, 1, shuffle=False).epoch(0))
    inputs, targets = batches.train(shard)
    assert inputs.shape == targets.shape == (9, 20)
    assert (targets != NO_ANSWER).sum(1).tolist() == [3] * 9
    train, _ = read_text(book, 20).windows(20)
    shown = inputs.where(targets == NO_ANSWER, targets)
    np.testing.assert_array_equal(shown.numpy(), train[:9])
    halves = [batches.train(next(Sharding(90, 9, 1, rank, 2, shuffle=False).epoch(0)))[0] for rank in range(2)]
    assert torch.equal(torch.cat(halves), inputs)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(WORDS * 30)
    (tmp_path / "a.txt").write_bytes(b"alpha beta " * 60)
    (tmp_path / "c.csv").write_bytes(b"left out")
    text = read_text(tmp_path, 4)
    assert bytes(WORDS[:0]) == b""
    first = text.train[0]
    assert first < FIRST + BYTES  # "alpha" without a space before it occurs once and is spelt
    assert text.vocabulary == FIRST + BYTES + 12


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file or folder"), (b"", "0 tokens"), (b"short", "too few for texts of 16"), (LINE, "at most")],
)
def test_text_that_cannot_be_used_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_text(path, 16)


def test_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \*\.txt"):
        read_text(tmp_path, 16)


READER = """
from torch import nn

def reader(num_classes):
    return nn.Sequential(nn.Embedding(num_classes, 8), nn.Linear(8, num_classes))
"""


def test_a_text_is_trained_on_with_any_number_of_workers_alike(book: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "work" / "mine.py").write_text(READER)
    arguments = ("--model", "mine:reader", "--data", "text", "--data-dir", book, "--global-batch", 7, "--steps", 5)
    summaries = []
    for workers in (1, 2):
        done = cli("train", *arguments, "--set", "sequence_length=20", "--workers", workers, "--json")
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads(done.stdout))
    one, two = (summary["epochs"][0] for summary in summaries)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert two["test_correct"] == one["test_correct"]
    assert one["test_masked_tokens"] == 10 * 3
    assert summaries[0]["task"] == "masked language"
    assert summaries[0]["tokens_per_s"] > 0
    assert "book.txt" in summaries[0]["data"]
