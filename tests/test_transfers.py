"""The simulation of a step's transfers: orders, lateness, bounds, chunk sizes."""

from __future__ import annotations

import itertools
import random

import pytest

from syncline.predict.transfers import (
    Chunk,
    Link,
    chunk_bytes,
    next_use_first,
    predict_ahead,
    predict_barrier,
    ready_first,
)

LINK = Link(alpha_s=0.0, beta_s=1.0)
"""A byte a second."""


def layers(sizes: list[int], backward_s: float, forward_s: float) -> list[Chunk]:
    """Chunks of equal compute: the last layer is ready first, the first is due first."""
    count = len(sizes)
    return [
        Chunk(size, backward_s * (count - number) / count, backward_s + forward_s * number / count)
        for number, size in enumerate(sizes)
    ]


def test_no_chunk_is_no_delay() -> None:
    assert next_use_first([], LINK) == ()
    assert predict_ahead([], LINK, 3.0, ()).step_s == 3.0
    assert predict_barrier([], LINK, 3.0, 2.0).step_s == 3.0


def test_what_is_due_first_goes_first_among_what_is_ready() -> None:
    chunks = [Chunk(1, 0.0, 9.0), Chunk(1, 0.0, 5.0), Chunk(1, 1.5, 2.0)]
    assert next_use_first(chunks, LINK) == (1, 0, 2)  # at 1.0 the urgent one is not there yet
    assert ready_first(chunks, LINK) == (0, 1, 2)


def test_link_is_idle_until_something_is_ready_and_a_static_list_waits_for_its_head() -> None:
    chunks = [Chunk(1, 4.0, 5.0), Chunk(1, 0.0, 9.0)]
    assert next_use_first(chunks, LINK) == (1, 0)
    assert predict_ahead(chunks, LINK, 9.0, (1, 0)).step_s == 9.0
    assert predict_ahead(chunks, LINK, 9.0, (0, 1)).step_s == 9.0  # 1 ends at 6, due at 9
    assert predict_ahead(chunks, LINK, 9.0, (0, 1)).bound_s == 9.0


def test_step_is_compute_and_the_largest_lateness() -> None:
    chunks = layers([2, 2, 2], backward_s=3.0, forward_s=3.0)
    ahead = predict_ahead(chunks, LINK, 6.0, next_use_first(chunks, LINK))
    barrier = predict_barrier(chunks, LINK, 6.0, 3.0)
    # Ready at 3, 2, 1; one after the other from 1: ends at 3, 5, 7. With a barrier forward begins at 7.
    assert barrier.step_s == 6.0 + 4.0
    assert ahead.step_s == 6.0 + 3.0  # the second layer's chunk goes last, and arrives at 7 instead of 4
    assert ahead.order == (2, 0, 1)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_order_of_small_equal_chunks_has_less_lateness(seed: int) -> None:
    """With chunks of one size and whole release times nothing is gained by idling or by preempting."""
    draw = random.Random(seed)
    chunks = [Chunk(1, float(draw.randint(0, 5)), draw.uniform(2, 12)) for _ in range(6)]
    planned = predict_ahead(chunks, LINK, 12.0, next_use_first(chunks, LINK)).step_s
    best = min(predict_ahead(chunks, LINK, 12.0, order).step_s for order in itertools.permutations(range(6)))
    assert planned == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_prediction_lies_between_its_bound_and_the_barrier(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(8)]
    compute = (draw.uniform(5, 20), draw.uniform(2, 10))
    chunks = layers(sizes, *compute)
    ahead = predict_ahead(chunks, LINK, sum(compute), next_use_first(chunks, LINK))
    barrier = predict_barrier(chunks, LINK, sum(compute), compute[0])
    assert ahead.bound_s <= ahead.step_s + 1e-9
    assert ahead.step_s <= barrier.step_s + max(sizes)  # up to one chunk that is on the link already


def test_chunk_is_the_smallest_whose_start_up_is_a_tenth() -> None:
    assert chunk_bytes(Link(1e-3, 8e-9), 20_000_000) == 1_125_000  # 9 x 1 ms at 125 MB/s
    assert chunk_bytes(Link(1e-6, 8e-9), 10_000_000) == 500_000
    assert chunk_bytes(Link(1.0, 8e-9), 30_000_000) == 8_000_000
    assert chunk_bytes(Link(1e-6, 8e-9), 240_000_000) == 10_000_000  # at most 24 chunks
