"""Buckets: the mean is right for every method, model and option, and the engine keeps its promises on the way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers import (
    assert_same,
    caught,
    expected_mean,
    gradients,
    integer_loss,
    integer_model,
    on_threads,
    one_compute_thread,
    small_batches,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from syncline.comm import Communicator
from syncline.comm.communicator import Operation, Work
from syncline.comm.threads import run_threads
from syncline.comm.wrapper import Wrapper
from syncline.errors import CommunicationError, ContractError, PlanError, SynclineError
from syncline.measure.certify import Certificate, Certifier
from syncline.measure.verdict import judge_sum
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.bucketed import Bucketed
from syncline.sync.flat import FlatSync
from syncline.workload.models import build_model
from syncline.workload.sharding import Sharding

TINY = 1e-4
"""MB: buckets of 100 bytes, so that small models have many and large parameters are split."""
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


# Exact on integers.


class Weights(nn.Module):
    """Parameters whose gradients are whatever factors the loss multiplies them with."""

    def __init__(self, *kinds: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in kinds)

    def forward(self, rank: int, turn: int) -> Tensor:
        """Gradients are multiples of 12 up to 36: exact, and so is their mean, in bfloat16 too."""
        stream = torch.Generator().manual_seed(100 * turn + rank)
        factors = [12 * torch.randint(-3, 4, weight.shape, generator=stream) for weight in self.all]
        products = [(weight * factor).sum() for weight, factor in zip(self.all, factors, strict=True)]
        return torch.stack([product.double() for product in products]).sum()


def one_dtype(dtype: torch.dtype) -> Callable[[], Weights]:
    return lambda: Weights(((7, 5), dtype), ((3,), dtype), ((), dtype), ((0, 2), dtype))


def mixed_dtypes() -> Weights:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    return Weights(*[((4, 3), dtype) for dtype in dtypes], *[((5,), dtype) for dtype in dtypes])


def huge_and_tiny() -> Weights:
    f32 = torch.float32
    return Weights(*[((2,), f32)] * 20, ((50, 6), f32), *[((1,), f32)] * 20)


WEIGHTS: dict[str, Callable[[], Weights]] = {
    "float16": one_dtype(torch.float16),
    "bfloat16": one_dtype(torch.bfloat16),
    "float64": one_dtype(torch.float64),
    "mixed dtypes": mixed_dtypes,
    "one huge and many tiny": huge_and_tiny,
}
NETWORKS = ["tied", "frozen", "channels-last"]


def make(name: str) -> nn.Module:
    return WEIGHTS[name]() if name in WEIGHTS else integer_model(name)


def loss_of(name: str, module: nn.Module, rank: int, turn: int) -> Tensor:
    loss: Tensor = module(rank, turn) if name in WEIGHTS else integer_loss(module, rank, turn)
    return loss


def mean_one_after_the_other(name: str, world_size: int, turn: int) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        model = make(name)
        loss_of(name, model, rank, turn).backward()
        for key, gradient in gradients(model).items():
            sums[key] = sums.get(key, 0) + gradient.double()
    assert all(torch.equal(total, total.round()) for total in sums.values())
    return {key: total / world_size for key, total in sums.items()}


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


# Within the bound on floats.


def small_vgg() -> nn.Module:
    """VGG-like: convolutions with batch norm and pooling, channels last, at a fraction of the size."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def cnn_without_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 10))


FLOAT_MODELS = {"vgg": small_vgg, "cnn without batch norm": cnn_without_batch_norm}


@cache
def float_template(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FLOAT_MODELS[name]()


def float_loss(module: nn.Module, rank: int) -> Tensor:
    stream = torch.Generator().manual_seed(rank)
    images = torch.randn(4, 3, 8, 8, generator=stream).contiguous(memory_format=torch.channels_last)
    return cross_entropy(module(images), torch.randint(10, (4,), generator=stream))


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


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


# How buckets are laid out, and in which order they go.


class Branches(nn.Module):
    """Two branches that are used in an order of the rank's own, so that gradients become ready in another order."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.swapped = swapped
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - number)

    def forward(self, values: Tensor) -> Tensor:
        last, first = (self.right, self.left) if self.swapped else (self.left, self.right)
        result: Tensor = last(first(self.head(values)))
        return result


def branch_loss(module: nn.Module, rank: int) -> Tensor:
    return (module(torch.ones(2, 4) * (rank + 1)) * 12).sum()


def in_place_of_readiness(sync: Bucketed) -> list[str]:
    """Names of the parameters in the order in which they lie in the buffer."""
    slots = sync.layout.slots
    return [sync._names[number] for number in sorted(range(len(slots)), key=lambda number: slots[number].start)]


def test_new_order_after_the_first_step_is_rank_0_s_on_every_rank() -> None:
    def live(comm: Communicator, _: EventLog) -> tuple[list[str], list[str], list[dict[str, Tensor]]]:
        model = Branches(swapped=comm.rank != 0)
        sync = make_sync("bucketed", comm, bucket_cap_mb=TINY)
        assert isinstance(sync, Bucketed)
        module = sync.attach(model)
        before = in_place_of_readiness(sync)
        found = []
        for _ in range(3):
            model.zero_grad()
            branch_loss(module, comm.rank).backward()
            sync.finish()
            found.append(gradients(model))
        return before, in_place_of_readiness(sync), found

    expected: dict[str, Tensor] = {}
    for rank in range(3):
        model = Branches(swapped=rank != 0)
        branch_loss(model, rank).backward()
        expected = {key: expected.get(key, 0) + value for key, value in gradients(model).items()}
    for before, after, found in on_threads(3, live):
        assert before == [name for name, _ in reversed(list(Branches().named_parameters()))]
        # left is used last on rank 0, so it is ready first.
        assert [name.split(".")[0] for name in after] == ["left", "left", "right", "right", "head", "head"]
        for one in found:
            assert_same(one, {key: value / 3 for key, value in expected.items()})


def test_transfers_start_in_bucket_order_whatever_order_buckets_fill_in() -> None:
    def live(comm: Communicator, log: EventLog) -> list[str]:
        model = Branches(swapped=comm.rank == 1)
        sync = make_sync("bucketed", comm, bucket_cap_mb=TINY / 5)
        module = sync.attach(model)
        log.records.clear()
        branch_loss(module, comm.rank).backward()
        sync.finish()
        sent = [record for record in log.records if str(record.get("label")).startswith("bucket ")]
        return [record["label"] for record in sorted(sent, key=lambda record: record["start"])]

    for labels in on_threads(2, live):
        sent = [label for label in labels if label != "bucket order"]
        assert sent == [f"bucket {number}" for number in range(len(sent))]
        assert len(sent) > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_with_overlap_buckets_leave_before_backward_ends_and_without_only_then(overlap: bool) -> None:
    """A bucket is sent when its gradients are there: the first one waits for nobody's last gradient."""

    def live(comm: Communicator, _: EventLog) -> int:
        sync = make_sync("bucketed", comm, bucket_cap_mb=TINY, overlap=overlap)
        model = Branches()
        announced: list[int] = []
        module = sync.attach(model)
        send = sync._send
        sync._send = lambda number: (announced.append(number), send(number))[1]
        branch_loss(module, comm.rank).backward()
        before_finish = len(announced)
        sync.finish()
        assert announced == list(range(len(announced)))
        return before_finish

    assert [count > 0 for count in on_threads(2, live)] == [overlap] * 2


def test_buffers_are_one_extra_copy_of_the_gradients() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        for method in ("bucketed", "shared-memory"):
            model = huge_and_tiny()
            sync = make_sync(method, comm)
            assert isinstance(sync, FlatSync)
            module = sync.attach(model)
            for turn in range(2):
                model.zero_grad()
                module(comm.rank, turn).backward()
                sync.finish()
            held = sum(buffer.numel() * buffer.element_size() for buffer in sync._buffers.values())
            own = sum(p.numel() * p.element_size() for p in model.parameters())
            flags = 4 * len(list(model.parameters()))
            assert held == own + flags
            inside = [range(b.data_ptr(), b.data_ptr() + b.nbytes) for b in sync._buffers.values()]
            assert all(any(p.grad.data_ptr() in one for one in inside) for p in model.parameters())

    on_threads(2, live)


def test_bucket_map_names_sizes_and_parameters() -> None:
    def live(comm: Communicator, _: EventLog) -> str:
        sync = make_sync("bucketed", comm, bucket_cap_mb=0.0008)
        assert isinstance(sync, FlatSync)
        sync.attach(Weights(((300,), torch.float32), ((10,), torch.float32), ((0,), torch.float64)))
        return sync.describe()

    for text in on_threads(2, live):
        assert text.splitlines() == [
            "bucket 0: 0.00 MB, 0 parameters, no elements",
            "bucket 1: 0.00 MB, 2 parameters, all.1 … all.0",
            "bucket 2: 0.00 MB, 1 parameters, all.0 … all.0",
        ]


# Gradients that are kept, dropped, missing.


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("method", ["bucketed", "shared-memory", "ring"])
def test_both_kinds_of_zero_grad(method: str, set_to_none: bool) -> None:
    def live(comm: Communicator, _: EventLog) -> list[dict[str, Tensor]]:
        model = integer_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        sync = make_sync(method, comm)
        module = sync.attach(model)
        found = []
        for turn in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
            found.append(gradients(model))
        return found

    for found in on_threads(3, live):
        for turn, one in enumerate(found):
            right = mean_one_after_the_other("mlp", 3, turn)
            assert_same(one, {key: value.float() for key, value in right.items()})


class Optional(nn.Module):
    """A net and a branch that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = integer_model("mlp")
        self.extra = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.uses_extra = False

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images)
        return result + self.extra.sum() if self.uses_extra else result


FLAT = ["bucketed", "shared-memory", "halving-doubling"]


@pytest.mark.parametrize("method", FLAT)
def test_parameter_unused_on_every_rank_keeps_no_gradient(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = Optional()
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(3):
            model.zero_grad()
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
            assert model.never.grad is None
            assert model.extra.grad is None
            right = mean_one_after_the_other("mlp", comm.world_size, turn)
            assert_same(gradients(model.net), {key: value.float() for key, value in right.items()})

    on_threads(3, live)


@pytest.mark.parametrize("turn_of_trouble", [0, 2])
@pytest.mark.parametrize("method", FLAT)
def test_parameter_unused_on_some_ranks_is_an_error_on_all_that_names_it_and_them(
    method: str, turn_of_trouble: int
) -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        model = Optional()
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(turn_of_trouble):
            model.zero_grad()
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
        model.zero_grad()
        model.uses_extra = comm.rank == 1
        integer_loss(module, comm.rank).backward()
        return caught(sync.finish)

    for rank, error in enumerate(on_threads(3, live)):
        assert isinstance(error, ContractError)
        assert error.rank == rank
        assert "parameter extra " in error.message
        assert "not on 0, 2." in error.message
        assert 'unused="zero"' in error.action


@pytest.mark.parametrize("method", FLAT)
def test_unused_counts_as_zero_where_asked_for(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> list[Tensor | None]:
        model = Optional()
        sync = make_sync(method, comm, unused="zero")
        module = sync.attach(model)
        found = []
        for turn in range(3):
            model.zero_grad()
            model.uses_extra = comm.rank == turn
            (module(torch.ones(1, 3, 6, 6)).sum() * 3).backward()
            sync.finish()
            assert model.never.grad is None
            assert model.extra.grad is not None
            found.append(model.extra.grad.clone())
        return found

    for found in on_threads(3, live):
        assert [one.tolist() for one in found if one is not None] == [[4.0] * 3] * 3  # 4 outputs x 3 / 3 ranks


@pytest.mark.parametrize("method", FLAT)
@pytest.mark.parametrize(("change", "name"), [("freeze", "3.bias"), ("unfreeze", "1.weight")])
def test_requires_grad_changed_after_attach_is_an_error_that_names_the_parameter(
    method: str, change: str, name: str
) -> None:
    def live(comm: Communicator, _: EventLog) -> str:
        model = integer_model("frozen")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        model.get_parameter(name).requires_grad_(change == "unfreeze")
        with pytest.raises(SynclineError) as error:
            integer_loss(module, comm.rank)
        return error.value.message

    assert on_threads(2, live) == [f"requires_grad of {name} was changed after attach."] * 2


@pytest.mark.parametrize("how", ["times zero", "no backward", "backward elsewhere"])
@pytest.mark.parametrize("method", FLAT)
def test_rank_whose_backward_touches_no_parameter_does_not_hang_the_others(method: str, how: str) -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm, unused="zero")
        module = sync.attach(model)
        for _ in range(2):
            model.zero_grad()
            loss = integer_loss(module, comm.rank)
            if comm.rank == 0 and how == "times zero":
                (loss * 0).backward()
            elif comm.rank == 0 and how == "backward elsewhere":
                torch.ones(1, requires_grad=True).sum().backward()
            elif comm.rank != 0:
                loss.backward()
            sync.finish()
        return gradients(model)

    model = integer_model("mlp")
    (integer_loss(model, 1) / 3 + integer_loss(model, 2) / 3).backward()
    for found in on_threads(3, live, deadline_s=10):
        assert_same(found, gradients(model))


# Accumulation, several backwards, checkpointing.


@pytest.mark.parametrize("method", FLAT)
def test_no_sync_accumulates_sends_nothing_and_is_left_properly_by_an_exception(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        log.records.clear()
        with pytest.raises(KeyError), sync.no_sync():  # noqa: PT012
            integer_loss(module, comm.rank, 0).backward()
            with sync.no_sync():
                integer_loss(module, comm.rank, 1).backward()
            sync.finish()
            raise KeyError
        assert log.records == []
        integer_loss(module, comm.rank, 2).backward()
        sync.finish()
        return gradients(model)

    for found in on_threads(3, live):
        assert_same(found, expected_mean("mlp", 3, turns=3))


@pytest.mark.parametrize("method", FLAT)
def test_several_backwards_add_up(method: str) -> None:
    """Without zero_grad, the mean of each backward is added to what is there."""

    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(2):
            loss = integer_loss(module, comm.rank, turn)
            loss.backward(retain_graph=True)
            sync.finish()
        return gradients(model)

    for found in on_threads(4, live):
        assert_same(found, expected_mean("mlp", 4, turns=2))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net = integer_model("mlp")
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1).requires_grad_()
        for layer in list(self.net)[1:]:
            values = checkpoint(layer, values, use_reentrant=self.reentrant)
        return values


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", FLAT)
def test_activation_checkpointing(method: str, reentrant: bool) -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = Checkpointed(reentrant=reentrant)
        sync = make_sync(method, comm, **({} if method == "shared-memory" else {"bucket_cap_mb": TINY}))
        module = sync.attach(model)
        for _ in range(2):
            model.zero_grad()
            integer_loss(module, comm.rank).backward()
            sync.finish()
        return gradients(model.net)

    for found in on_threads(2, live):
        assert_same(found, expected_mean("mlp", 2))


# State, hooks, errors.


def test_state_brings_back_the_layout_and_with_it_every_bit() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        first = make_sync("ring", comm, bucket_cap_mb=TINY)
        second = make_sync("ring", comm, bucket_cap_mb=TINY)
        assert isinstance(first, Bucketed)
        assert isinstance(second, Bucketed)
        model, other = (copy.deepcopy(float_template("cnn without batch norm")) for _ in range(2))
        module = first.attach(model)
        assert first.state() == {}
        float_loss(module, comm.rank).backward()
        first.finish()
        second.attach(other)
        assert second.layout != first.layout
        second.load_state(first.state())
        assert second.layout == first.layout
        assert second.state() == first.state()
        for sync, one in ((first, model), (second, other)):
            one.zero_grad()
            float_loss(one, comm.rank + 10).backward()
            sync.finish()
        assert torch.equal(flat_gradient(model), flat_gradient(other))
        assert second.layout == first.layout

    on_threads(3, live)


def test_state_of_many_ranks_is_no_trouble_for_one() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        sync = make_sync("bucketed", comm)
        sync.attach(integer_model("mlp"))
        sync.load_state({"order": [3, 2, 1, 0]})

    on_threads(1, live)


class FailingSplit(Wrapper):
    """Its split's transfers fail from the given one on."""

    def __init__(self, inner: Communicator, fail_at: int, *, split: bool = False) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.is_split = split
        self.calls = 0

    def split(self, name: str) -> Communicator:
        return FailingSplit(self.inner.split(name), self.fail_at, split=True)

    def start(self, operation: Operation) -> Work:
        self.calls += self.is_split
        if self.calls > self.fail_at:
            raise CommunicationError("the cable is cut.", rank=self.rank)
        return super().start(operation)

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        body(self)


@pytest.mark.parametrize("options", [{}, {"collective": "ring"}, {"overlap": False}, {"groups": 2}])
@pytest.mark.parametrize("fail_at", [0, 3])
def test_error_in_the_sending_thread_is_raised_by_finish(options: dict[str, Any], fail_at: int) -> None:
    def live(backend: Communicator) -> str:
        sync = make_sync("bucketed", FailingSplit(backend, fail_at), bucket_cap_mb=TINY, **options)
        integer_loss(sync.attach(integer_model("mlp")), backend.rank).backward()
        error = caught(sync.finish)
        assert error is not None
        sync.detach()
        return error.message

    assert run_threads(2, live, deadline_s=5) == ["the cable is cut."] * 2


def test_communication_hook_sees_every_gradient_and_its_result_counts() -> None:
    """The result is a tensor of its own here; torch's hooks often write into the bucket."""

    def live(comm: Communicator, _: EventLog) -> tuple[list[tuple[int, bool]], dict[str, Tensor]]:
        seen: list[tuple[int, bool]] = []

        def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            assert state == "state"
            assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
            assert len(bucket.gradients()) == len(bucket.parameters())
            seen.append((bucket.index(), bucket.is_last()))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), 7))
            return future

        model = integer_model("mlp")
        sync = make_sync("bucketed", comm, bucket_cap_mb=TINY)
        sync.register_comm_hook("state", hook)
        integer_loss(sync.attach(model), comm.rank).backward()
        sync.finish()
        return seen, gradients(model)

    for seen, found in on_threads(2, live):
        last = len(seen) - 1
        assert seen == [(number, number == last) for number in range(len(seen))]
        assert last > 3
        assert all(bool((gradient == 7).all()) for gradient in found.values())


@pytest.mark.parametrize("method", FLAT)
def test_detach_removes_hooks_and_the_thread_and_leaves_gradients(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        integer_loss(sync.attach(model), comm.rank).backward()
        sync.finish()
        before = gradients(model)
        sync.detach()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
        assert not model._forward_pre_hooks
        log.records.clear()
        assert_same(gradients(model), before)
        model.zero_grad()
        integer_loss(model, comm.rank).backward()
        sync.finish()
        assert log.records == []
        return gradients(model)

    before = set(threading.enumerate())
    for rank, found in enumerate(on_threads(2, live)):
        alone = integer_model("mlp")
        integer_loss(alone, rank).backward()
        assert_same(found, gradients(alone))
    assert set(threading.enumerate()) <= before


def test_one_rank_has_no_hooks_and_no_buffers() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = integer_model("mlp")
        sync = make_sync("bucketed", comm)
        assert sync.attach(model) is model
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())

    on_threads(1, live)


def test_native_all_reduce_of_16_bits_is_refused() -> None:
    with pytest.raises(PlanError, match="native"):
        run_threads(1, lambda comm: make_sync("bucketed", comm, transfer_dtype="bf16", collective="native"))


# 16-bit transfers under the certificate.


class RoundsTo8Bits(Bucketed):
    def complete(self) -> None:
        super().complete()
        for buffer in self._buffers.values():
            buffer.copy_(buffer.to(torch.float8_e4m3fn))


def certify_16_bits(kind: type[Bucketed], wire: torch.dtype, collective: str, world_size: int) -> Certificate:
    template = build_model("cnn", seed=1)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[wire]

    def live(comm: Communicator, log: EventLog) -> Certificate | None:
        return Certifier(
            communicator=comm,
            make_sync=lambda c: kind(c, transfer_dtype=name, collective=collective),
            make_exact=lambda c: Bucketed(c, collective=collective),
            wire_dtype=wire,
            make_model=lambda: copy.deepcopy(template),
            batches=small_batches(),
            sharding=Sharding(200, 4 * comm.world_size + 1, 7, comm.rank, comm.world_size),
            log=log,
            steps=2,
        ).run()

    first, *_ = on_threads(world_size, live)
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("wire", "collective", "world_size"),
    [(torch.bfloat16, "direct", 2), (torch.float16, "ring", 3), (torch.bfloat16, "halving-doubling", 4)],
)
def test_16_bit_transfers_are_certified_as_lossy_and_bounded(
    wire: torch.dtype, collective: str, world_size: int
) -> None:
    certificate = certify_16_bits(Bucketed, wire, collective, world_size)
    assert certificate.passed
    assert certificate.sequential.status == "lossy"
    assert 0 < certificate.sequential.ratio <= 1
    assert certificate.one_worker.status == "explained"
    assert certificate.one_worker.cause == "lossy transfers"


def test_coarser_rounding_than_declared_is_not_certified() -> None:
    certificate = certify_16_bits(RoundsTo8Bits, torch.bfloat16, "direct", 2)
    assert not certificate.passed
