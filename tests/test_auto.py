"""auto: what it takes where, why, and that what it takes on several hosts gives the bits of any other choice."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline
from syncline.jobs import leading, method_names
from syncline.plan import Plan
from syncline.resolve import choose_method, resolve

APART = {"workers": 2, "hosts": 2, "method": "auto", "data": "synthetic", "model": "cnn"}


@pytest.mark.parametrize(
    ("where", "method", "words"),
    [
        ({"num_hosts": 2}, "ahead", "without a gain of 3 %, it waits as bucketed does"),
        ({"num_hosts": 2, "not_late": "clipping needs every gradient"}, "bucketed", "several hosts, and clipping"),
        ({"num_hosts": 2, "device": "cuda"}, "bucketed", "not on the CPU"),
        ({"num_hosts": 2, "workers": 1}, "single", "one worker"),
    ],
)
def test_what_auto_stands_for_and_why(where: dict[str, Any], method: str, words: str) -> None:
    chosen, why = choose_method(**{"device": "cpu", "workers": 2, **where})
    assert chosen == method
    assert words in why


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({}, "ahead"),
        ({"accumulate": 2}, "ahead"),
        ({"optimizer": {"name": "adamw"}}, "ahead"),
        ({"optimizer": {"clip_norm": 1.0}}, "bucketed"),
        ({"options": {"bucket_cap_mb": 3.0}}, "bucketed"),
        ({"options": {"unused": "zero"}}, "bucketed"),
        ({"options": {"unused": "error"}}, "ahead"),
    ],
)
def test_plan_on_several_hosts(given: dict[str, Any], method: str) -> None:
    chosen, sentence = resolve(Plan(**{**APART, **given}), ranks_per_host=1, num_hosts=2)
    assert chosen.method == method
    assert f"Method {method}: ranks are on several hosts" in sentence
    assert chosen.options.unused == given.get("options", {}).get("unused")


def test_comparison_takes_what_suits_its_hosts() -> None:
    """Before the hosts are known it stays a choice; one host's choice would be refused on several."""
    assert leading(method_names(["single", "auto"])) == "auto"
    assert method_names(["ddp", "auto"], Plan(**APART)) == ["ddp", "ahead"]
    assert method_names(["bucketed", "auto"], Plan(**APART, optimizer={"clip_norm": 1.0})) == ["bucketed"]
    assert method_names(["auto"], Plan(workers=2)) == ["shared-memory"]


# In a script.


class Deaf(torch.optim.SGD):
    """Not torch's own: nobody knows what its step looks at."""


def wrapped_on_two_hosts() -> dict[str, tuple[str, str]]:
    """Two processes, of which launch says that they are on two hosts."""
    os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo")
    found = {}

    def wrap(name: str, make: Any = torch.optim.SGD, model: nn.Module | None = None, **keywords: Any) -> None:
        model = nn.Linear(4, 4) if model is None else model
        optimizer = None if make is None else make(model.parameters(), lr=0.1)
        wrapper = syncline.DataParallel(model, "auto", optimizer=optimizer, **keywords)
        wrapper(torch.ones(2, 4) if name != "sparse" else torch.tensor([1, 2])).sum().backward()
        found[name] = (wrapper.method, wrapper.reason)

    wrap("sgd")
    wrap("no optimizer", None)
    wrap("own optimizer", Deaf)
    wrap("lbfgs", torch.optim.LBFGS)
    wrap("bucket size", bucket_cap_mb=5)
    wrap("unused", find_unused_parameters=True)
    wrap("sparse", model=nn.Embedding(4, 4, sparse=True))
    wrap("left out", lambda parameters, lr: torch.optim.SGD([*parameters][1:], lr=lr))
    return found


def test_script_on_several_hosts_goes_ahead_only_where_nothing_makes_it_wait() -> None:
    for found in syncline.launch(wrapped_on_two_hosts, workers=2, threads=1):
        assert found.pop("sgd")[0] == "ahead"
        assert {method for method, _ in found.values()} == {"bucketed"}
        for name, words in (
            ("no optimizer", "no optimizer is given"),
            ("own optimizer", "Deaf may look at all gradients"),
            ("lbfgs", "LBFGS may look at all gradients"),
            ("bucket size", "a bucket size is given"),
            ("unused", "parameters may be unused"),
            ("sparse", "gradient of weight is sparse"),
            ("left out", "parameter weight is not in the optimizer"),
        ):
            assert words in found[name][1], name
