"""thread-replicas: replicas on threads give the gradients of one model on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import one_compute_thread
from torch import Tensor, nn

from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import PlanError
from syncline.methods import METHODS, BatchNorm
from syncline.sync import make_sync
from syncline.sync.batch_norm import attach
from syncline.sync.replicas import Replicas


def net(*, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(5) if batch_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3)).double()


def gradients_of(model: nn.Module, module: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    module(inputs).pow(2).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_gradients_are_those_of_the_whole_batch(replicas: int, batch: int) -> None:
    model = net()
    inputs = torch.randn(batch, 4, dtype=torch.float64)
    expected = gradients_of(model, model, inputs)
    with one_compute_thread():
        sync = make_sync("thread-replicas", ThreadCommunicator(ThreadWorld(1), 0), replicas=replicas)
        found = gradients_of(model, sync.attach(model), inputs)
        sync.finish()
        sync.detach()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.sends_nothing])
@pytest.mark.parametrize("policy", ["broadcast", "sync"])
def test_policies_across_ranks_ask_nothing_of_ranks_that_wait(method: str, policy: BatchNorm) -> None:
    """As in a comparison, where rank 0 takes the whole batch: rank 1 does not come, and nobody may wait for it."""
    model = net(batch_norm=True)
    sync = make_sync(method, ThreadCommunicator(ThreadWorld(2, deadline_s=0.5), 0), batch_norm=policy)
    with one_compute_thread():
        attach(sync, model, policy)(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
        sync.finish()
        sync.detach()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_accumulate_and_replicas_see_updates() -> None:
    model, reference = net(), net()
    replicas = Replicas(model, 2)
    inputs = torch.randn(6, 4, dtype=torch.float64)
    for module in (replicas, reference):
        optimizer = torch.optim.SGD((model if module is replicas else reference).parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                module(inputs).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    replicas.close()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert len(list(replicas.parameters())) == len(list(model.parameters())), "only the master's are trained"


def test_batch_norm_state_is_the_first_replicas() -> None:
    model = net(batch_norm=True)
    alone = copy.deepcopy(model)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    replicas = Replicas(model, 2)
    replicas(inputs)
    replicas.close()
    alone(inputs[:4])
    torch.testing.assert_close(model[1].running_mean, alone[1].running_mean)  # type: ignore[index]
    assert int(model[1].num_batches_tracked) == 1  # type: ignore[index,arg-type]


def test_evaluation_uses_the_same_weights() -> None:
    model = net(batch_norm=True).eval()
    replicas = Replicas(model, 3).eval()
    inputs = torch.randn(7, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(replicas(inputs), model(inputs))
    replicas.close()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3).double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        answer = self.line(inputs)
        return answer, answer * 2


def test_several_heads_are_put_together() -> None:
    model = TwoHeads()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    answer, twice = model(inputs)
    (answer.pow(2).mean() + twice.mean()).backward()
    expected = model.line.weight.grad
    model.zero_grad()
    replicas = Replicas(model, 2)
    answer, twice = replicas(inputs)
    (answer.pow(2).mean() + twice.mean()).backward()
    replicas.close()
    assert expected is not None
    torch.testing.assert_close(model.line.weight.grad, expected)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"answer": self.line(inputs)}


def test_outputs_that_cannot_be_put_together_are_refused() -> None:
    replicas = Replicas(Odd(), 2)
    with pytest.raises(PlanError, match="tensors or tuples"):
        replicas(torch.randn(4, 4))
    replicas.close()


def test_an_error_in_a_replica_is_raised() -> None:
    replicas = Replicas(nn.Linear(3, 2), 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        replicas(torch.randn(4, 4))
    replicas.close()
