"""Keras 3 models with the torch backend: batch-norm statistics are parameters there, and must not drift apart."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SYNCLINE
from torch import nn

import syncline
from syncline.errors import PlanError
from syncline.sync.base import keras_statistics

EXAMPLE = Path(__file__).parents[1] / "examples" / "keras_models.py"
needs_keras = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")


class LikeKeras(nn.Module):
    """What Keras makes of dense layers with batch norm: parameters in a dictionary, and no other modules."""

    def __init__(self) -> None:
        super().__init__()
        values = {
            "norm/kernel": (torch.ones(3, 3), True), "norm/gamma": (torch.ones(3), True),
            "norm/moving_mean": (torch.zeros(3), False), "norm/moving_variance": (torch.ones(3), False),
            "frozen/kernel": (torch.ones(3), False),
        }  # fmt: skip
        self.held = nn.ParameterDict({name: nn.Parameter(value, grad) for name, (value, grad) in values.items()})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        held = self.held
        values = values @ held["norm/kernel"]
        if not self.training:
            return (values - held["norm/moving_mean"]) * held["norm/moving_variance"].rsqrt() * held["norm/gamma"]
        variance, mean = torch.var_mean(values, 0)
        with torch.no_grad():
            held["norm/moving_mean"].lerp_(mean, 0.5)
            held["norm/moving_variance"].lerp_(variance, 0.5)
        return (values - mean) * variance.rsqrt() * held["norm/gamma"]


def statistics_of(method: str, batch_norm: str) -> list[torch.Tensor]:
    """This rank's statistics after each forward."""
    model = syncline.DataParallel(LikeKeras(), method, batch_norm=batch_norm)
    random = torch.Generator().manual_seed(model.communicator.rank)
    seen = []
    for _ in range(3):
        model(torch.randn(4, 3, generator=random)).sum().backward()
        seen.append(model.module.held["norm/moving_mean"].detach().clone())
    return seen


def all_statistics() -> dict[tuple[str, str], Any]:
    cases = [(method, norm) for method in ("bucketed", "ddp") for norm in ("broadcast", "local")]
    found: dict[tuple[str, str], Any] = {case: statistics_of(*case) for case in cases}
    with pytest.raises(PlanError, match="Keras's batch norm has no layers in torch"):
        syncline.DataParallel(LikeKeras(), "bucketed", batch_norm="sync")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], Any]]:
    return syncline.launch(all_statistics, workers=2, threads=1)


@pytest.mark.parametrize("method", ["bucketed", "ddp"])
def test_statistics_of_rank_0_are_every_rank_s_before_the_next_forward(method: str, ranks: list[Any]) -> None:
    """As with torch's buffers. A forward moves them half of the way to its own batch, so where it began is known."""
    for step in (1, 2):
        for norm, is_shared in (("broadcast", True), ("local", False)):
            first, second = (rank[method, norm] for rank in ranks)
            begun = 2 * second[step] - batch_mean(1, step)
            assert torch.allclose(begun, first[step - 1], rtol=1e-4, atol=1e-5) is is_shared


def batch_mean(rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 3, generator=random) for _ in range(step + 1)]
    return (batches[step] @ torch.ones(3, 3)).mean(0)


def test_frozen_weights_are_no_statistics() -> None:
    assert [name for name, _ in keras_statistics(LikeKeras())] == [
        "held.norm/moving_mean",
        "held.norm/moving_variance",
    ]
    assert keras_statistics(nn.BatchNorm1d(3)) == []


@needs_keras
def test_example_trains_a_keras_model_on_two_workers(tmp_path: Path) -> None:
    environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
    words = [str(SYNCLINE), "launch", str(EXAMPLE), "--workers", "2", "--", "--steps", "4"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+) on 2 workers", done.stdout)]
    assert len(losses) == 4, done.stdout


@needs_keras
def test_keras_names_its_statistics_as_we_expect(tmp_path: Path) -> None:
    code = """
import keras
from syncline.sync.base import keras_statistics
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
print([name.rpartition('/')[2] for name, _ in keras_statistics(model)])
"""
    environment = {**os.environ, "KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "['moving_mean', 'moving_variance']\n", done.stderr
