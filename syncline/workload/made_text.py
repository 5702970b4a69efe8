"""Made texts: each counts up with a stride of its own, so that its neighbours tell a masked token."""

from __future__ import annotations

import numpy as np

from syncline.workload.hashing import mix, word
from syncline.workload.masking import MaskedTexts, Tokens
from syncline.workload.sharding import Indices
from syncline.workload.tasks import Task
from syncline.workload.text import FIRST

NUM_TRAIN, NUM_TEST = 10_000, 100
PERIOD = 61
"""So many tokens occur, however large the vocabulary: others would hardly ever be seen."""
STRIDES = 8


def made_texts(task: Task, *, seed: int) -> MaskedTexts:
    length, vocabulary = task.input_shape[0], task.num_classes

    def texts(numbers: Indices, part: int) -> Tokens:
        bits = mix(mix(word(part)) + numbers.astype(np.uint64))
        start, stride = bits % np.uint64(PERIOD), 1 + bits // np.uint64(PERIOD) % np.uint64(STRIDES)
        counted = start[:, None] + stride[:, None] * np.arange(length, dtype=np.uint64)
        return FIRST + (counted % np.uint64(min(PERIOD, vocabulary - FIRST))).astype(np.int64)

    return MaskedTexts(
        task,
        train=lambda numbers: texts(numbers, 1),
        test=lambda numbers: texts(numbers, 2),
        num_train=NUM_TRAIN,
        num_test=NUM_TEST,
        source=f"Synthetic texts of {length} tokens: {NUM_TRAIN:,} to train and {NUM_TEST:,} to test on.",
        seed=seed,
    )
