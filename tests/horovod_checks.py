"""What ranks check of Horovod's API, each a function. One set of processes runs them all, in this order."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import syncline
import syncline.horovod.torch as hvd
from syncline.horovod import world
from syncline.horovod.torch import averaging
from syncline.measure.certify import judge_close, judge_sum

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if not all(word in str(error) for word in words):
            raise AssertionError(f"{words} not in {error}") from error
        return
    raise AssertionError(f"no {kind.__name__}")


def place() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert not hvd.mpi_built()
    assert hvd.nccl_built() == 0 or isinstance(hvd.nccl_built(), int)


def reductions_of_every_type() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    for dtype, shape in itertools.product((*INTEGERS, *FLOATS), ((), (0,), (3,), (2, 3))):
        tensor = torch.full(shape, rank + 1, dtype=dtype)
        expected = {
            hvd.Sum: total, hvd.Min: 1, hvd.Max: size, hvd.Product: [1, 1, 2, 6][size],
            hvd.Average: total / size if dtype in FLOATS else total // size,
        }  # fmt: skip
        for op, value in expected.items():
            reduced = hvd.allreduce(tensor, op=op)
            assert reduced.shape == tensor.shape
            assert torch.equal(reduced, torch.full(shape, value, dtype=dtype)), (dtype, shape, op, reduced)
        assert (tensor == rank + 1).all(), "the input was changed"
    flags = torch.tensor([rank == 0, False, True])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False, True]
    assert hvd.allreduce(torch.tensor([-5 - rank])).item() == -((5 * size + total - size) // size)  # cut off


def scales() -> None:
    size = hvd.size()
    values = torch.tensor([-7.0, 3.0, 10.0])
    for dtype in (torch.int32, torch.float16, torch.float32, torch.float64):
        tensor = values.to(dtype)
        math = torch.float64 if dtype is torch.int32 else torch.float32 if dtype is torch.float16 else dtype
        before = (tensor.to(math) * torch.tensor(0.3, dtype=math)).to(dtype) * size
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3), before)
        after = ((tensor * size).to(math) * torch.tensor(0.3, dtype=math)).to(dtype)
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.3), after)


def in_place_and_not_contiguous() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(hvd.allreduce(tensor), tensor)
    same = hvd.allreduce_(tensor, op=hvd.Sum)
    assert same is tensor
    assert torch.equal(tensor, size * torch.arange(12.0).reshape(3, 4).t())
    own = torch.full((2, 2), float(rank)).t()
    assert hvd.broadcast_(own, size - 1) is own
    assert (own == size - 1).all()
    group = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    assert [t.tolist() for t in hvd.grouped_allreduce(group, op=hvd.Sum)] == [[size] * 2, [size] * 3]
    hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert group[1].tolist() == [size] * 3


def average_is_deprecated() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.allreduce(torch.ones(1), average=False).item() == hvd.size()
    assert any(issubclass(warning.category, DeprecationWarning) for warning in caught)
    with raises(ValueError, "supersedes"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        gathered = hvd.allgather(torch.ones(rank + 1, 2).to(dtype) * (rank > 0))
        assert gathered.dtype == dtype
        assert gathered.shape == (size * (size + 1) // 2, 2)
        assert gathered[:1].sum() == 0
    assert hvd.allgather(torch.full((2 * rank,), rank)).tolist() == [r for r in range(size) for _ in range(2 * r)]
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == list(range(size))
    first, second = hvd.grouped_allgather([torch.ones(1), torch.full((rank,), 2)])
    assert (len(first), len(second)) == (size, size * (size - 1) // 2)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object({"rank": rank} if rank == 1 else None, 1) == {"rank": 1}


def all_to_all() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*INTEGERS, *FLOATS):
        rows = torch.tensor([r for r in range(size) for _ in range(rank + 1)]).to(dtype).unsqueeze(1).repeat(1, 2)
        output, received = hvd.alltoall(rows, torch.tensor([rank + 1] * size, dtype=torch.int32))
        assert received.tolist() == [r + 1 for r in range(size)]
        assert output.shape == (size * (size + 1) // 2, 2)
        assert (output == rank).all()
        assert (hvd.alltoall(rows) == rank).all()
    with raises(ValueError, "evenly"):
        hvd.alltoall(torch.ones(size + 1))
    with raises(ValueError, "32-bit"):
        hvd.alltoall(torch.ones(size), torch.ones(size))
    with raises(ValueError, "Sum of splits"):
        hvd.alltoall(torch.ones(size - 1), torch.ones(size, dtype=torch.int32))


def reduce_scatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1
    total = torch.arange(rows * 3.0).reshape(rows, 3)
    counts = [2 + (r < 1) for r in range(size)]
    own = total.split(counts)[rank]
    assert torch.equal(hvd.reducescatter(total), own)
    assert torch.equal(hvd.reducescatter(total, op=hvd.Sum), own * size)
    assert [len(part) for part in hvd.grouped_reducescatter([total, total])] == [counts[rank]] * 2
    with raises(ValueError, "scalar"):
        hvd.reducescatter(torch.tensor(1.0))


def free_order_and_handles() -> None:
    rank, size = hvd.rank(), hvd.size()
    numbers = list(range(20))
    order = numbers if rank % 2 else numbers[::-1]
    handles = {n: hvd.allreduce_async(torch.full((n,), float(rank)), name=f"free.{n}") for n in order}
    assert all(isinstance(handle, int) for handle in handles.values())
    for number in numbers:
        assert (hvd.synchronize(handles[number]) == (size - 1) / 2).all()
    handle = hvd.allreduce_async(torch.ones(2))
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.synchronize(handle) is None, "a handle is good for one result"
    with raises(ValueError):
        hvd.poll(handle)


def a_name_on_its_way_is_refused_and_barriers_pass() -> None:
    rank = hvd.rank()
    if rank == 0:
        first = hvd.allreduce_async(torch.ones(1), name="twice")
        with raises(ValueError, "same name"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        assert not hvd.poll(first), "the others have not submitted it"
    hvd.barrier()
    if rank > 0:
        first = hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.barrier()
    assert hvd.synchronize(first).item() == 1


def mismatches_name_both_sides() -> None:
    rank, size = hvd.rank(), hvd.size()
    last = rank == size - 1
    cases: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: hvd.allreduce(torch.ones(4 if last else 3), name="m"), ("shapes", "'m'", "rank 0", "[3]", "[4]")),
        (lambda: hvd.allreduce(torch.ones(2, 6).view((3, 4) if last else (2, 6))), ("[2, 6]", "[3, 4]")),
        (lambda: hvd.allreduce(torch.ones(2).to(torch.int32 if last else torch.float32)), ("float32", "int32")),
        (lambda: hvd.allreduce(torch.ones(2), op=hvd.Max if last else hvd.Sum), ("sum", "max")),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor=2.0 if last else 1.0), ("scale", "2.0")),
        (lambda: hvd.broadcast(torch.ones(2), 1 if last else 0), ("root", "from rank 0", "from rank 1")),
        (lambda: hvd.allgather(torch.ones(2, 4 if last else 3)), ("allgather", "[2, 3]", "[2, 4]")),
        (lambda: hvd.alltoall(torch.ones(size).to(torch.int32 if last else torch.float32)), ("alltoall", "int32")),
    ]
    for call, words in cases:
        with raises(hvd.HorovodInternalError, f"rank {size - 1}", *words):
            call()
    assert hvd.allreduce(torch.ones(1)).item() == 1, "an error is over when it was raised"


def another_operation_under_one_name() -> None:
    call = hvd.allgather if hvd.rank() else hvd.allreduce
    with raises(hvd.HorovodInternalError, "allreduce", "allgather", "'other'"):
        call(torch.ones(2), name="other")


def gradients() -> None:
    """Of a loss that every rank computes alike, as gathers and broadcasts assume."""
    rank, size = hvd.rank(), hvd.size()

    class Shared(torch.autograd.Function):
        """Every rank has the same input, so its gradient is the sum of what ranks contribute."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return hvd.allreduce(gradient, op=hvd.Sum)

    def own(tensor: Tensor) -> Tensor:
        return Shared.apply(tensor)[rank]

    def rows(tensor: Tensor) -> Tensor:
        return Shared.apply(tensor)[rank, : rank + 1]

    functions: list[Callable[[Tensor], Any]] = [
        lambda x: hvd.allgather(own(x)),
        lambda x: hvd.allgather(rows(x)),
        lambda x: hvd.grouped_allgather([own(x), rows(x)]),
        lambda x: hvd.broadcast(own(x), size - 1),
        lambda x: hvd.allgather(hvd.alltoall(own(x))),
        lambda x: hvd.allgather(hvd.alltoall(own(x), [1] * (size - 1) + [0])[0]),
    ]
    inputs = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for function in functions:
        assert torch.autograd.gradcheck(function, (inputs.requires_grad_(),))
    same = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for op in (hvd.Average, hvd.Sum):
        assert torch.autograd.gradcheck(lambda x, op=op: hvd.allreduce(x, op=op, prescale_factor=0.5), (same,))
        assert torch.autograd.gradcheck(lambda x, op=op: hvd.grouped_allreduce([x, 2 * x], op=op), (same,))
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        leaf = torch.ones(size + 1, 2, requires_grad=True)
        hvd.reducescatter(leaf, op=op).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full((size + 1, 2), float(factor)))


def sets_of_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    with raises(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.add_process_set([0])
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 1])
    if size > 2:
        hvd.init(process_sets=[pair])
        assert (pair.process_set_id, pair.size()) == (1, 2)
        assert pair.included() == (rank < 2)
        if rank < 2:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
            assert hvd.broadcast(torch.tensor([rank]), 1, process_set=pair).item() == 1
        else:
            with raises(ValueError, "not in"):
                hvd.allreduce(torch.ones(1), process_set=pair)
        hvd.shutdown()
        assert pair.process_set_id is None
    hvd.init(process_sets="dynamic")
    alone = hvd.add_process_set([size - 1])
    with raises(ValueError, "already"):
        hvd.add_process_set([size - 1])
    with raises(ValueError, "already"):
        hvd.add_process_set(range(size))
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=alone)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if rank == size - 1:
        assert (alone.rank(), hvd.allgather(torch.ones(1), process_set=alone).tolist()) == (0, [1])
    assert hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(alone)


def state_of_parameters_and_optimizers() -> None:
    rank = hvd.rank()
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1), betas=(0.5, 0.9 - 0.1 * rank), amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10 * (rank + 1)),
    ]
    for make in kinds:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        if rank == 0:
            with optimizer.skip_synchronize():
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        before = [parameter.clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert (model.weight.grad is None) == (rank > 0)  # the root has made a step
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        states = hvd.allgather_object((model.state_dict(), optimizer.state_dict()))
        assert all(str(state) == str(states[0]) for state in states)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.zero_grad()
    hvd.broadcast_optimizer_state(plain, 0)  # nobody has made a step: zeros, which every rank can broadcast
    assert hvd.broadcast(model.weight.grad, 0).tolist() == torch.zeros(2, 3).tolist()
    assert plain.state_dict()["state"] == {}
    hvd.broadcast_parameters(list(model.named_parameters()), 1)
    with raises(ValueError, "LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with raises(ValueError, "invalid params"):
        hvd.broadcast_parameters("weights", 0)  # type: ignore[arg-type]


class Halved:
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor * 2).to(ctx)


def _network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def certificate() -> None:
    """The gradients of ranks are those of their shards in turn, and of one worker on the whole batch; and so are the
    weights after five steps."""
    rank, size = hvd.rank(), hvd.size()
    inputs = torch.randn(4 * size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ways = itertools.product((hvd.Average, hvd.Sum), ("none", "fp16", "own"), (1, 2), (False, True))
    for op, compression, passes, on_links in ways:
        with _as_on_links(on_links):
            compressor = Halved if compression == "own" else getattr(hvd.Compression, compression)
            divide = hvd.size() if op is hvd.Sum else 1
            model, alone = _network(), _network()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1 / divide, momentum=0.9), model.named_parameters(), op=op,
                compression=compressor, backward_passes_per_step=passes,
            )  # fmt: skip
            reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
            exact = not (on_links and compression == "fp16")
            for step in range(5):
                parts = []
                for shard in range(size):
                    alone.zero_grad()
                    alone(inputs[shard::size]).square().mean().backward()
                    parts.append(_flat(alone))
                alone.zero_grad()
                alone(inputs).square().mean().backward()
                optimizer.zero_grad()
                for number in range(passes):
                    batch = inputs[rank::size][number::passes]
                    (model(batch).square().mean() / passes).backward()
                optimizer.synchronize()
                if step == 0:
                    own = _flat(model) / divide
                    in_turn = judge_sum(own, parts, None if exact else torch.float16)
                    assert in_turn.passed or (passes > 1 and judge_close(own, _flat(alone)).passed), in_turn
                    assert judge_close(own, _flat(alone)).passed or not exact
                with optimizer.skip_synchronize():
                    optimizer.step()
                reference.step()
            if on_links and compression != "own":  # the last layer first, as backward makes them
                assert optimizer.averaging._engine.state()["order"][0] >= 4, optimizer.averaging._engine.state()
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            error = max(float((own - other).abs().max()) for own, other in pairs)
            assert error < (1e-12 if exact else 1e-3), (op, compression, passes, on_links, error)


@contextmanager
def _as_on_links(on_links: bool) -> Iterator[None]:
    """The engine that ranks on hosts of their own have."""
    real = averaging._kind
    if on_links:
        averaging._kind = lambda named: averaging.FedBucketed
    try:
        yield
    finally:
        averaging._kind = real


def optimizer_rules() -> None:
    model = _network(torch.float32)
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, words in (
        ([parameter for _, parameter in named], "sequence of tuples"),
        ([("same", parameter) for _, parameter in named], "unique"),
        (named[:-1], "not named"),
    ):
        with raises(ValueError, words):
            hvd.DistributedOptimizer(sgd, wrong)  # type: ignore[arg-type]
    with raises(ValueError, "predivide"):
        hvd.DistributedOptimizer(sgd, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    with raises(ValueError, "must be > 0"):
        hvd.DistributedOptimizer(sgd, named, backward_passes_per_step=0)
    with raises(ValueError, "only appear once"):
        hvd.DistributedOptimizer(sgd, named, groups=[[named[0][1]], [named[0][1]]])
    before = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, named, groups=2)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer._parameter_names == {parameter: name for name, parameter in named}
    assert optimizer.param_groups is sgd.param_groups
    model(torch.ones(6)).sum().backward()
    with raises(AssertionError, "zero_grad"):
        optimizer.zero_grad(set_to_none=False)
    with raises(AssertionError, "backward_passes_per_step"):
        model(torch.ones(6)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        before.step()
    assert any("skip_synchronize" in str(warning.message) for warning in caught)
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.zero_grad()
    optimizer.step()  # nobody has a gradient: all are zeros
    assert all(parameter.grad is not None and not parameter.grad.any() for _, parameter in named)


def gradients_that_some_ranks_miss() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    frozen = model[1].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0 or step == 1:
            model[0](torch.ones(2)).sum().backward()
        optimizer.step()
        assert torch.allclose(model[0].weight.grad, torch.full((1, 2), 1.0 if step == 1 else 1 / size))
    frozen.requires_grad_(True)
    optimizer.zero_grad()
    (model[0](torch.ones(2)) + (rank + 1) * model[1](torch.ones(2))).sum().backward()
    optimizer.step()
    assert torch.allclose(frozen.grad, torch.full((1, 2), (size + 1) / 2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    (optimizer.param_groups[1]["params"][0] * rank).backward()
    optimizer.step()
    assert optimizer.param_groups[1]["params"][0].grad.item() == (size - 1) / 2


def sparse_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    for as_dense in (False, True):
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters(), sparse_as_dense=as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, 4])).sum().backward()
            optimizer.synchronize()
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse  # also if it travelled dense
        expected = torch.zeros(5, 2)
        expected[:size] += 1 / size
        expected[4] += 1
        assert torch.allclose(gradient.to_dense(), expected)
    for as_dense, compression in ((True, hvd.Compression.none), (False, hvd.Compression.none), (True, Halved)):
        table = nn.Embedding(5, 2, sparse=True)
        adam = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(adam, sparse_as_dense=as_dense, compression=compression)
        hvd.broadcast_optimizer_state(optimizer, 0)
        before = table.weight.detach().clone()
        table(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()  # which refuses dense gradients
        assert (table.weight != before).all(1).tolist() == [row < size or row == 4 for row in range(5)]
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    table.weight.grad = torch.zeros(5, 2)
    for _ in range(3):  # dense at first, then sparse
        table(torch.tensor([rank])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert torch.allclose(table.weight.grad.to_dense()[:size], torch.full((size, 2), 1 / size))
        optimizer.zero_grad()
    own = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=False)
    assert hvd.sparse_allreduce_async(own, "s", hvd.Sum)().to_dense().tolist() == [1.0] * size


def adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 3:
        with raises(NotImplementedError, "power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1, 1], "the same direction is averaged"
    across = torch.tensor([1.0, 0.0]) if rank else torch.tensor([0.0, 3.0])
    assert hvd.allreduce(across, op=hvd.Adasum).tolist() == [1, 3], "orthogonal ones are added"
    model = nn.Linear(2, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), 0)
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    model(across).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight.detach() - start, torch.tensor([[-0.1, -0.3]]))
    with raises(AssertionError, "Skipping"):
        optimizer.skip_synchronize()


def join_with_uneven_batches() -> None:
    rank, size = hvd.rank(), hvd.size()
    model, idle = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    never = hvd.DistributedOptimizer(torch.optim.SGD(idle.parameters(), lr=0.1), idle.named_parameters())
    for batch in range(2 * rank):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        active = sum(2 * other > batch for other in range(size))
        assert torch.allclose(model.weight.grad, torch.full((1, 2), active / size)), (batch, model.weight.grad)
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"active {batch}")
        assert total.item() == active
    if rank == size - 1:  # the only one whose other optimiser steps at all
        idle(torch.ones(2)).sum().backward()
        never.step()
        with raises(hvd.HorovodInternalError, "join"):
            hvd.allgather(torch.ones(1))
    assert hvd.join() == size - 1
    assert (model.weight.grad is None) == (rank == 0), "a rank's own gradients are left alone"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.join() in range(size)


def batch_norm_over_all_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    batch = torch.randn(4 * size, 3, 2, generator=torch.Generator().manual_seed(5))
    ours, torchs = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    own = batch[rank::size].clone().requires_grad_()
    whole = batch.clone().requires_grad_()
    output, expected = ours(own), torchs(whole)
    assert torch.allclose(output, expected[rank::size], atol=1e-5)
    assert torch.allclose(ours.running_var, torchs.running_var)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(own.grad, whole.grad[rank::size], atol=1e-4)


def timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="traced")
        if hvd.rank() == 0:
            assert "NEGOTIATE_ALLREDUCE" in path.read_text()  # before it has ended
        hvd.stop_timeline()
        assert path.exists() == (hvd.rank() == 0)
        if hvd.rank() == 0:
            names = {event["name"] for event in json.loads(path.read_text())}
            assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names
            assert "allreduce.traced" in path.read_text()


def recording() -> None:
    """A Horovod script under syncline.record: the parts of its steps add up."""
    own = tempfile.mkdtemp()
    folder = hvd.broadcast_object(own, 0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    with syncline.record(model, optimizer, Path(folder) / "run"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    hvd.barrier()
    if hvd.rank() == 0:
        explained = syncline.explain(Path(folder) / "run")
        assert explained.advice is not None
        shutil.rmtree(folder)
    elif own != folder:
        shutil.rmtree(own)
    hvd.barrier()


def init_again() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = _network(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(6)).sum().backward()
        optimizer.step()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with raises(ValueError, "not been initialized"):
            hvd.rank()
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # as good as none
        hvd.init()
        hvd.init()
        del os.environ["HOROVOD_TIMELINE"]
        assert world.current().lane.timeline._file is None
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


class _Told(io.StringIO):
    """What is told; a file says that all the words were among it."""

    def __init__(self, words: tuple[str, ...], heard: Path) -> None:
        super().__init__()
        self.words, self.heard = words, heard

    def write(self, text: str) -> int:
        written = super().write(text)
        if all(word in self.getvalue() for word in self.words):
            self.heard.touch()
        return written


def a_rank_that_never_comes_is_named() -> None:
    """Rank 0 waits; the others come once it was told what they did last and where they are."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "", 0))
    hvd.allreduce(torch.ones(1), name="before")
    if hvd.rank() == 0:
        words = ("s in allreduce.late for rank 1, which did allreduce 'before' ", "and is at horovod_checks.py:")
        with redirect_stderr(_Told(words, folder / "heard")):
            assert hvd.allreduce(torch.ones(1), name="late").item() == 1
        shutil.rmtree(folder)
    else:
        while not (folder / "heard").exists():
            time.sleep(0.01)
        hvd.allreduce(torch.ones(1), name="late")


def a_lost_rank_is_an_error_at_once() -> None:
    """The last: rank 1 leaves without a word, once the others are here."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 1 else "", 1))
    if hvd.rank() == 1:
        while len(list(folder.iterdir())) < hvd.size() - 1:  # told outside hvd: each has its last result
            time.sleep(0.01)
        link = world.current().link
        assert link is not None
        link.close()
        shutil.rmtree(folder)
        return
    (folder / str(hvd.rank())).touch()
    with raises(hvd.HorovodInternalError, "rank 1 was lost"):
        hvd.allreduce(torch.ones(1), name="lost")
    with raises(hvd.HorovodInternalError, "lost"):
        hvd.barrier()


CHECKS: list[Callable[[], None]] = [
    place, reductions_of_every_type, scales, in_place_and_not_contiguous, average_is_deprecated, gathers, all_to_all,
    reduce_scatter, free_order_and_handles, a_name_on_its_way_is_refused_and_barriers_pass,
    mismatches_name_both_sides, another_operation_under_one_name, gradients, sets_of_ranks,
    state_of_parameters_and_optimizers, certificate, optimizer_rules, gradients_that_some_ranks_miss,
    sparse_gradients, adasum, join_with_uneven_batches, batch_norm_over_all_ranks, timeline, recording, init_again,
    a_rank_that_never_comes_is_named, a_lost_rank_is_an_error_at_once,
]  # fmt: skip


def run_all(stall_check_s: float) -> dict[str, str]:
    """What became of each check here: 'ok', or the traceback of the first that failed."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(stall_check_s)
    hvd.init()
    outcomes: dict[str, str] = {}
    for check in CHECKS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check()
            outcomes[check.__name__] = "ok"
        except BaseException:
            outcomes[check.__name__] = traceback.format_exc()
            break
    hvd.shutdown()
    return outcomes
