"""Batch norm across ranks: synchronised layers compute what one worker computes, forward, backward and in buffers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import on_threads
from torch import Tensor, nn

from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.spans import EventLog
from syncline.sync.batch_norm import Statistics, SyncBatchNorm, samples_not_counted, synchronise_batch_norm

CHANNELS = 3
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d, no length": (nn.BatchNorm1d(CHANNELS), (CHANNELS,)),
    "1d": (nn.BatchNorm1d(CHANNELS), (CHANNELS, 5)),
    "2d": (nn.BatchNorm2d(CHANNELS), (CHANNELS, 4, 2)),
    "3d": (nn.BatchNorm3d(CHANNELS), (CHANNELS, 2, 3, 2)),
    "cumulative": (nn.BatchNorm2d(CHANNELS, momentum=None), (CHANNELS, 4, 2)),
    "untracked": (nn.BatchNorm2d(CHANNELS, track_running_stats=False), (CHANNELS, 4, 2)),
    "plain": (nn.BatchNorm2d(CHANNELS, affine=False, eps=0.01), (CHANNELS, 4, 2)),
}


def template(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, ten samples far from zero, and the gradient that comes back for each; all in float64."""
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double()
    stream = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.uniform_(0.5, 2, generator=stream)
    values = 3 + torch.randn(10, *shape, generator=stream, dtype=torch.float64)
    return layer, values, torch.randn(10, *shape, generator=stream, dtype=torch.float64)


def run(layer: nn.Module, values: Tensor, back: Tensor, *, turns: int = 2) -> list[Tensor]:
    """Outputs and the gradients of input and parameters of the last turn, after several."""
    for _ in range(turns):
        layer.zero_grad()
        values = values.detach().requires_grad_()
        output = layer(values)
        output.backward(back)
    return [output.detach(), values.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def shards(sizes: list[int]) -> list[slice]:
    return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]


def synced(name: str, sizes: list[int], *, channels_last: bool = False) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """What each rank computes on its shard, and its buffers."""

    def on_rank(communicator: Communicator, _log: EventLog) -> tuple[list[Tensor], dict[str, Any]]:
        layer, values, back = template(name)
        part = shards(sizes)[communicator.rank]
        own, own_back = values[part], back[part]
        if channels_last:
            own = own.to(memory_format=torch.channels_last)
        layer = synchronise_batch_norm(layer, Statistics(communicator.split("batch norm")))
        assert isinstance(layer, SyncBatchNorm)
        return run(layer, own, own_back), layer.state_dict()

    return on_threads(len(sizes), on_rank)


def assert_as_one_worker(name: str, found: list[tuple[list[Tensor], dict[str, Any]]]) -> None:
    layer, values, back = template(name)
    output, gradient, *of_parameters = run(layer, values, back)
    parts = [tensors for tensors, _ in found]
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), output, **close)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, **close)
    for number, expected in enumerate(of_parameters):
        total = sum(part[2 + number] for part in parts)
        torch.testing.assert_close(total, expected, **close)
    for _, state in found:
        assert state.keys() == layer.state_dict().keys()
        for key, expected in layer.state_dict().items():
            torch.testing.assert_close(state[key], expected, **close)


@pytest.mark.parametrize("name", LAYERS)
def test_uneven_shards_are_normalised_as_one_batch(name: str) -> None:
    assert_as_one_worker(name, synced(name, [4, 1, 5]))


@pytest.mark.parametrize("sizes", [[10, 0], [0, 3, 7], [5, 5]])
def test_rank_without_samples_takes_part(sizes: list[int]) -> None:
    assert_as_one_worker("2d", synced("2d", sizes))


def test_channels_last_stays_channels_last() -> None:
    found = synced("2d", [6, 4], channels_last=True)
    assert_as_one_worker("2d", found)
    for output, gradient, *_ in (tensors for tensors, _ in found):
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_stand_ins_leave_no_trace() -> None:
    """Two samples that do not count, on a rank of their own: the others compute what they would without them."""

    def on_rank(communicator: Communicator, _log: EventLog) -> tuple[list[Tensor], dict[str, Any]]:
        layer, values, back = template("2d")
        layer = synchronise_batch_norm(layer, Statistics(communicator.split("batch norm")))
        if communicator.rank == 1:
            with samples_not_counted(layer):
                stood_in = run(layer, values[:2] * 7, back[:2] * 0)
            empty = values[:0]
            assert stood_in[1].abs().max() == 0
            return [empty, empty, *stood_in[2:]], layer.state_dict()
        return run(layer, values, back), layer.state_dict()

    assert_as_one_worker("2d", on_threads(2, on_rank))


def test_gradient_by_finite_differences() -> None:
    """The formula itself, over two ranks that each hold half of the batch."""

    def on_rank(communicator: Communicator, _log: EventLog) -> list[Tensor]:
        layer, values, back = template("2d")
        layer = synchronise_batch_norm(layer, Statistics(communicator.split("batch norm")))
        part = shards([5, 5])[communicator.rank]
        found = run(layer, values[part], back[part], turns=1)
        differences = torch.zeros(6, dtype=torch.float64)
        for index in range(6):
            sides = []
            for sign in (1, -1):
                moved = values.clone()
                moved.view(-1)[index] += sign * 1e-5
                with torch.no_grad():
                    sides.append((layer(moved[part]) * back[part]).sum())
            differences[index] = (sides[0] - sides[1]) / 2e-5
        return [found[1].reshape(-1)[:6], differences]

    ranks = on_threads(2, on_rank)
    # A sample of rank 0 moves the outputs of both ranks: the change of the whole loss is the sum.
    torch.testing.assert_close(ranks[0][0], ranks[0][1] + ranks[1][1], rtol=1e-6, atol=1e-8)
    assert ranks[1][1].abs().max() > 1e-4


def test_evaluation_sends_nothing_and_uses_running_statistics() -> None:
    def on_rank(communicator: Communicator, log: EventLog) -> None:
        layer, values, back = template("2d")
        plain = copy.deepcopy(layer)
        layer = synchronise_batch_norm(layer, Statistics(communicator.split("batch norm")))
        part = shards([5, 5])[communicator.rank]
        run(layer, values[part], back[part], turns=3)
        plain.load_state_dict(layer.state_dict())
        layer.eval(), plain.eval()
        sent = len(log.records)
        if communicator.rank == 0:  # alone: nobody else calls
            assert torch.equal(layer(values), plain(values))
            assert torch.equal(run(layer, values, back)[1], run(plain, values, back)[1])
            assert len(log.records) == sent

    on_threads(2, on_rank)


def test_one_value_per_channel_in_all_is_refused_and_one_per_rank_is_not() -> None:
    def on_rank(communicator: Communicator, _log: EventLog) -> None:
        layer = nn.BatchNorm1d(CHANNELS)
        synced = synchronise_batch_norm(nn.Sequential(layer), Statistics(communicator.split("batch norm")))
        synced(torch.full((1, CHANNELS), float(communicator.rank)))
        with pytest.raises(ValueError, match="batch norm 0 cannot normalise one value"):
            synced(torch.ones(1 if communicator.rank else 0, CHANNELS))

    on_threads(2, on_rank)


def test_sixteen_bit_inputs_have_statistics_in_32_bits() -> None:
    def on_rank(communicator: Communicator, _log: EventLog) -> None:
        values = torch.randn(4, CHANNELS, 2, 2, generator=torch.Generator().manual_seed(communicator.rank))
        layer = synchronise_batch_norm(nn.BatchNorm2d(CHANNELS), Statistics(communicator.split("batch norm")))
        own = values.bfloat16().requires_grad_()
        output = layer(own)
        output.float().square().sum().backward()
        assert (output.dtype, layer.running_mean.dtype) == (torch.bfloat16, torch.float32)
        assert own.grad is not None
        assert own.grad.dtype == torch.bfloat16
        assert layer.weight.grad.dtype == torch.float32

    on_threads(2, on_rank)


class Twice(nn.Module):
    """One layer under two names, and one inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(CHANNELS)
        self.second = self.first
        self.deeper = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS))


def statistics_of_one() -> Statistics:
    (made,) = on_threads(1, lambda communicator, _: Statistics(communicator))
    return made


def test_conversion_keeps_parameters_buffers_sharing_and_mode() -> None:
    model = Twice()
    model.deeper[1].eval()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert synchronise_batch_norm(model, statistics_of_one()) is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert model.first is model.second
    assert [layer.label for layer in (model.first, model.deeper[1])] == ["first", "deeper.1"]
    assert (model.first.training, model.deeper[1].training) == (True, False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.first) is nn.BatchNorm1d
        assert twin.first is twin.second
        assert twin.first.weight is not model.first.weight
        assert not {"statistics", "label", "kind"} & vars(twin.first).keys()
        twin.first(torch.ones(4, CHANNELS))


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("layer", "words"), [(nn.LazyBatchNorm1d(), "no size yet"), (Own(CHANNELS), "Own has its own forward")]
)
def test_what_cannot_be_synchronised_is_refused(layer: nn.Module, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        synchronise_batch_norm(nn.Sequential(layer), statistics_of_one())
