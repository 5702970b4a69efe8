"""A text file for masked-language modelling. Tokens are made from the file itself: nothing is downloaded.

A token is a word with the space before it, a run of punctuation, or, for words too rare to have a token of their
own, a single byte. So every file can be written in its tokens, whatever its language or encoding.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError

MASK = 0
FIRST = 1
"""The first token that stands for something."""
PIECE = re.compile(rb" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9\x80-\xff]+|\s")
BYTES = 256
LARGEST_VOCABULARY = 8192
MIN_COUNT = 2
"""A word that occurs once is spelt: its own token could only be learnt by heart."""
TEST_SHARE = 0.1
ENDING = "*.txt"


@dataclass(frozen=True)
class Text:
    """A file as tokens: the first part to train on, the last tenth to test on."""

    train: npt.NDArray[np.int32]
    test: npt.NDArray[np.int32]
    vocabulary: int
    source: str

    def windows(self, length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Training and test texts of this many tokens, one after the other; what is left at the end is dropped."""
        parts = [part[: len(part) // length * length].reshape(-1, length) for part in (self.train, self.test)]
        return parts[0], parts[1]


@lru_cache(maxsize=2)
def read_text(path: Path, length: int) -> Text:
    """The file, or all .txt files of the folder by name; refused if there is too little for texts of this length."""
    content = b"\n".join(file.read_bytes() for file in text_files(path))
    pieces = PIECE.findall(content)
    numbers = learn_vocabulary(pieces)
    tokens = encode(pieces, numbers)
    test = int(len(tokens) * TEST_SHARE)
    vocabulary = FIRST + BYTES + len(numbers)
    if test < length:
        raise DataError(
            f"{path} has {len(tokens):,} tokens: too few for texts of {length} and a tenth of them to test on.",
            action="Use a longer text" + (f", or set sequence_length to at most {test}." if test > 1 else "."),
        )
    source = f"Text {path.name}: {len(tokens):,} tokens, vocabulary {vocabulary:,}"
    return Text(tokens[: len(tokens) - test], tokens[len(tokens) - test :], vocabulary, source)


def text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob(ENDING) if file.is_file()) if path.is_dir() else []
    if not files:
        cause = f"the folder holds no {ENDING} files" if path.is_dir() else "there is no such file or folder"
        raise DataError(f"--data-dir {path} does not lead to a text: {cause}.", action="Point it to a text file.")
    return files


def learn_vocabulary(pieces: list[bytes]) -> dict[bytes, int]:
    """Numbers of the words that get one: the most frequent, equally frequent ones in the order of their bytes."""
    counts = Counter(pieces)
    worth = [(-count, piece) for piece, count in counts.items() if count >= MIN_COUNT and len(piece) > 1]
    ranked = [piece for _, piece in sorted(worth)[: LARGEST_VOCABULARY - FIRST - BYTES]]
    return {piece: FIRST + BYTES + index for index, piece in enumerate(ranked)}


def encode(pieces: list[bytes], numbers: dict[bytes, int]) -> npt.NDArray[np.int32]:
    tokens: list[int] = []
    for piece in pieces:
        number = numbers.get(piece)
        if number is None:
            tokens += [FIRST + byte for byte in piece]
        else:
            tokens.append(number)
    return np.array(tokens, dtype=np.int32)


def decode(tokens: npt.NDArray[np.int32], numbers: dict[bytes, int]) -> bytes:
    """The text again, byte for byte."""
    words = {number: piece for piece, number in numbers.items()}
    return b"".join(words.get(int(token)) or bytes([int(token) - FIRST]) for token in tokens)
