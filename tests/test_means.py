"""The mean is right for every method, model and option: exactly on integers, within the bound on floats."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradient_cases import (
    FLOAT_MODELS,
    NETWORKS,
    TINY,
    WEIGHTS,
    flat_gradient,
    float_loss,
    float_template,
    loss_of,
    make,
    mean_one_after_the_other,
)
from helpers import gradients, on_threads, one_compute_thread
from torch import Tensor

from syncline.comm import Communicator
from syncline.measure.certify import judge_sum
from syncline.sync import make_sync

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gather-scatter": ("gather-scatter", {}),
    "point-to-point": ("point-to-point", {}),
    "all-reduce": ("all-reduce", {}),
    "shared-memory": ("shared-memory", {}),
    "hierarchical": ("hierarchical", {"bucket_cap_mb": TINY}),
    "bucketed": ("bucketed", {}),
    "ring": ("ring", {}),
    "tree": ("tree", {}),
    "halving-doubling": ("halving-doubling", {}),
    "tiny buckets": ("bucketed", {"bucket_cap_mb": TINY}),
    "three groups": ("bucketed", {"bucket_cap_mb": TINY, "groups": 3}),
    "no overlap": ("bucketed", {"bucket_cap_mb": TINY, "overlap": False}),
    "direct": ("bucketed", {"bucket_cap_mb": TINY, "collective": "direct"}),
    "root": ("bucketed", {"collective": "root"}),
    "ring of tiny buckets": ("ring", {"bucket_cap_mb": 2 * TINY}),
}
IN_RANK_ORDER = {"gather-scatter", "point-to-point", "shared-memory"}
WORLD_SIZES = [1, 2, 3, 4]


def every_variant(comm: Communicator, name: str) -> dict[str, list[dict[str, Tensor]]]:
    """Two steps each: buckets are laid out anew after the first."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    for variant, (method, options) in VARIANTS.items():
        model = make(name)
        sync = make_sync(method, comm, **options)
        module = sync.attach(model)
        found[variant] = []
        for turn in range(2):
            model.zero_grad()
            loss_of(name, module, comm.rank, turn).backward()
            sync.finish()
            found[variant].append(gradients(model))
        sync.detach()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", [*NETWORKS, *WEIGHTS])
def test_mean_is_exact_on_integers(name: str, world_size: int) -> None:
    expected = [mean_one_after_the_other(name, world_size, turn) for turn in range(2)]
    for found in on_threads(world_size, lambda comm, _: every_variant(comm, name)):
        for variant, turns in found.items():
            for one, right in zip(turns, expected, strict=True):
                assert one.keys() == right.keys(), variant
                for key, gradient in one.items():
                    assert torch.equal(gradient.double(), right[key]), (variant, key)


def parts_one_after_the_other(name: str, world_size: int) -> list[Tensor]:
    parts = []
    for rank in range(world_size):
        model = copy.deepcopy(float_template(name))
        float_loss(model, rank).backward()
        parts.append(flat_gradient(model))
    return parts


def every_variant_on_floats(comm: Communicator, name: str) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for variant, (method, options) in VARIANTS.items():
        model = copy.deepcopy(float_template(name))
        sync = make_sync(
            method, comm, **{**options, **({"bucket_cap_mb": 0.01} if "bucket_cap_mb" in options else {})}
        )
        module = sync.attach(model)
        found[variant] = []
        for _ in range(2):
            model.zero_grad()
            float_loss(module, comm.rank).backward()
            sync.finish()
            found[variant].append(flat_gradient(model))
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.stride() == parameter.stride()
        sync.detach()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_mean_is_within_the_bound_on_floats_and_the_same_on_all_ranks(name: str, world_size: int) -> None:
    with one_compute_thread():
        parts = parts_one_after_the_other(name, world_size)
    first, *others = on_threads(world_size, lambda comm, _: every_variant_on_floats(comm, name))
    for variant, turns in first.items():
        for turn, found in enumerate(turns):
            verdict = judge_sum(found, parts)
            assert verdict.status in (("bitwise",) if variant in IN_RANK_ORDER else ("bitwise", "order")), variant
            assert all(torch.equal(other[variant][turn], found) for other in others), variant
