"""The layout of gradients in flat buffers and buckets: what holds for any sizes, order and caps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.sync.layout import MB, Bucket, Layout, Size, plan_layout

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16]


def size(num_elements: int, dtype: torch.dtype = torch.float32) -> Size:
    return Size(num_elements, dtype.itemsize, (dtype, CPU))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Size], list[int], int, int]:
    """Sizes, order, cap and first cap."""
    sizes = draw(st.lists(st.builds(size, st.integers(0, 60), st.sampled_from(DTYPES)), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(sizes))))
    cap = draw(st.one_of(st.integers(1, 400), st.just(10**12)))
    return sizes, order, cap, draw(st.integers(0, cap))


def planned(plan: tuple[list[Size], list[int], int, int]) -> Layout:
    sizes, order, cap, first_cap = plan
    return plan_layout(sizes, order, cap_bytes=cap, first_cap_bytes=first_cap)


def of_group(layout: Layout, group: object) -> list[Bucket]:
    return [bucket for bucket in layout.buckets if bucket.group == group]


def num_gradients(sizes: list[Size], group: object) -> int:
    return sum(one.num_elements for one in sizes if one.group == group)


@given(plans())
def test_every_element_and_flag_is_in_exactly_one_bucket(plan: tuple[list[Size], list[int], int, int]) -> None:
    layout = planned(plan)
    for group, length in layout.lengths.items():
        covered = [index for bucket in of_group(layout, group) for index in range(bucket.start, bucket.stop)]
        assert sorted(covered) == list(range(length))


@given(plans())
def test_slots_lie_side_by_side_in_order_and_flags_behind_them(plan: tuple[list[Size], list[int], int, int]) -> None:
    sizes, order, *_ = plan
    layout = planned(plan)
    assert len(layout.slots) == len(sizes)
    for group, length in layout.lengths.items():
        members = [number for number in order if sizes[number].group == group]
        slots = [layout.slots[number] for number in members]
        assert all(slot.group == group for slot in slots)
        assert [slot.stop - slot.start for slot in slots] == [sizes[number].num_elements for number in members]
        edges = [0, *(slot.stop for slot in slots)]
        assert [slot.start for slot in slots] == edges[:-1]
        assert sorted(slot.flag for slot in slots) == list(range(num_gradients(sizes, group), length))


@given(plans())
def test_no_bucket_is_above_its_cap_but_for_the_flags_of_the_last(
    plan: tuple[list[Size], list[int], int, int],
) -> None:
    sizes, _, cap, first_cap = plan
    layout = planned(plan)
    for group in layout.lengths:
        item = group[0].itemsize
        for position, bucket in enumerate(of_group(layout, group)):
            gradients = min(bucket.stop, num_gradients(sizes, group)) - bucket.start
            allowed = max(item, min(cap, first_cap) if position == 0 else cap)  # one element is the least
            assert gradients * item <= allowed


@given(plans())
def test_buckets_are_as_full_as_the_cap_allows(plan: tuple[list[Size], list[int], int, int]) -> None:
    _, _, cap, first_cap = plan
    layout = planned(plan)
    for group in layout.lengths:
        item = group[0].itemsize
        small, full = max(1, min(cap, first_cap) // item), max(1, cap // item)
        *before, last = of_group(layout, group)
        for position, bucket in enumerate(before):
            # What is left before the small last bucket may be less than full.
            most = min(full, small * 2**position)
            assert bucket.stop - bucket.start in (range(1, most + 1) if bucket is before[-1] else [most])
        assert last.start >= last.stop - small - len(last.parameters)


@given(plans())
def test_bucket_waits_for_the_parameters_inside_it_and_the_last_of_a_group_for_all(
    plan: tuple[list[Size], list[int], int, int],
) -> None:
    sizes, order, *_ = plan
    layout = planned(plan)
    for group in layout.lengths:
        *before, last = of_group(layout, group)
        for bucket in before:
            inside = [
                number
                for number in order
                if layout.slots[number].group == group
                and layout.slots[number].start < bucket.stop
                and layout.slots[number].stop > bucket.start
            ]
            assert list(bucket.parameters) == inside
        assert sorted(last.parameters) == [n for n, one in enumerate(sizes) if one.group == group]


@given(plans())
def test_buckets_are_sent_in_the_order_in_which_they_can_be_ready(
    plan: tuple[list[Size], list[int], int, int],
) -> None:
    _, order, *_ = plan
    layout = planned(plan)
    place = {number: position for position, number in enumerate(order)}
    ready = [max(place[number] for number in bucket.parameters) for bucket in layout.buckets]
    assert ready == sorted(ready)
    for group in layout.lengths:
        starts = [bucket.start for bucket in of_group(layout, group)]
        assert starts == sorted(starts)


def test_dtypes_do_not_share_a_buffer() -> None:
    sizes = [size(3), size(4, torch.float16), size(5)]
    layout = plan_layout(sizes, [2, 1, 0], cap_bytes=MB, first_cap_bytes=MB)
    assert layout.lengths == {(torch.float32, CPU): 3 + 5 + 2, (torch.float16, CPU): 4 + 1}
    assert [bucket.group[0] for bucket in layout.buckets] == [torch.float16, torch.float32]


def test_buckets_double_from_a_small_first_one_up_to_the_cap() -> None:
    layout = plan_layout([size(150)], [0], cap_bytes=160, first_cap_bytes=40)
    cuts = [(0, 10), (10, 30), (30, 70), (70, 110), (110, 140), (140, 151)]
    assert [(bucket.start, bucket.stop) for bucket in layout.buckets] == cuts


def test_parameter_larger_than_a_bucket_is_split_and_keeps_one_slot() -> None:
    layout = plan_layout([size(5), size(100), size(5)], [2, 1, 0], cap_bytes=160, first_cap_bytes=160)
    assert (layout.slots[1].start, layout.slots[1].stop) == (5, 105)
    assert [1 in bucket.parameters for bucket in layout.buckets] == [True, True, True]


def test_huge_cap_gives_one_bucket_per_group() -> None:
    sizes = [size(1000), size(7, torch.float64), size(1000)]
    layout = plan_layout(sizes, [0, 1, 2], cap_bytes=10**12, first_cap_bytes=10**12)
    assert len(layout.buckets) == 2


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 7])
def test_tiny_cap_gives_one_element_a_bucket(cap: int) -> None:
    layout = plan_layout([size(3), size(2)], [1, 0], cap_bytes=cap, first_cap_bytes=0)
    assert [(bucket.start, bucket.stop) for bucket in layout.buckets] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 7)]


@pytest.mark.parametrize("counts", [[0], [0, 0], [0, 5], [5, 0], [5, 0, 5]])
def test_parameter_without_elements_has_a_flag_and_the_last_bucket_waits_for_it(counts: list[int]) -> None:
    layout = plan_layout([size(n) for n in counts], range(len(counts)), cap_bytes=8, first_cap_bytes=8)
    empty = counts.index(0)
    assert layout.slots[empty].start == layout.slots[empty].stop
    assert empty in layout.buckets[-1].parameters
    assert layout.buckets[-1].stop == sum(counts) + len(counts)


def test_nothing_to_place_gives_nothing() -> None:
    assert plan_layout([], [], cap_bytes=1, first_cap_bytes=1) == Layout((), (), {})
