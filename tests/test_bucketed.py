"""Buckets: how they are laid out, in which order they go, and that the engine keeps its promises on the way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_cases import FLAT, TINY, Weights, flat_gradient, float_loss, float_template, huge_and_tiny
from helpers import assert_same, caught, gradients, integer_loss, integer_model, on_threads, small_batches
from torch import Tensor, nn

from syncline.comm import Communicator
from syncline.comm.communicator import Operation, Work, Wrapper
from syncline.comm.threads import run_threads
from syncline.errors import CommunicationError, PlanError
from syncline.measure.certify import Certificate, Certifier
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.bucketed import Bucketed
from syncline.sync.flat import FlatSync
from syncline.workload.models import build_model
from syncline.workload.sharding import Sharding

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
        resumed = second.attach(other)
        assert second.layout != first.layout
        second.load_state(first.state())
        assert second.layout == first.layout
        assert second.state() == first.state()
        for sync, one, wrapped in ((first, model, module), (second, other, resumed)):
            one.zero_grad()
            # The same gradients in both, to the bit: those of a convolution depend on where tensors lie in memory.
            drawn = torch.Generator().manual_seed(comm.rank)
            given = sum((p * torch.randn(p.shape, generator=drawn)).sum() for p in one.parameters())
            (0 * float_loss(wrapped, comm.rank + 10) + given).backward()
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


def test_smallest_bucket_size_makes_no_more_buckets_than_can_be_sent_in_time() -> None:
    def live(comm: Communicator, _: EventLog) -> int:
        sync = Bucketed(comm, bucket_cap_mb=1e-6)
        module = sync.attach(nn.Linear(1000, 300))
        module(torch.ones(1, 1000)).sum().backward()
        sync.finish()
        return len(sync.layout.buckets)

    for count in on_threads(2, live):
        assert 60 < count < 70


@pytest.mark.parametrize("method", ["bucketed", "all-reduce", "gather-scatter", "shared-memory", "ahead"])
def test_gradients_have_the_strides_of_their_parameters(method: str) -> None:
    """A fused optimiser of torch reads both as they lie in memory, and computes nonsense where they differ."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.turned = nn.Parameter(torch.randn(5, 4).T)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images).mean((2, 3)) @ self.turned

    def live(communicator: Communicator, log: EventLog) -> list[tuple[object, object]]:
        torch.manual_seed(0)
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        sync = make_sync(method, communicator)
        module = sync.attach(model)
        for _ in range(3):
            module(torch.randn(2, 3, 8, 8)).sum().backward()
            sync.finish()
            strides = [(p.stride(), p.grad.stride()) for p in model.parameters() if p.grad is not None]
            assert len(strides) == 3
            optimizer.step()
            optimizer.zero_grad()
        sync.detach()
        return strides

    for strides in on_threads(2, live):
        assert all(own == gradient for own, gradient in strides)
