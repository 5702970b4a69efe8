"""hvd.elastic: a rank that dies is replaced, and training goes on from the last commit of those that live."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline.horovod.torch as hvd
from syncline.comm import instrumented
from syncline.comm.torch_backend import adopt
from syncline.errors import RankFailed, UsageError
from syncline.horovod.common.exceptions import HorovodInternalError
from syncline.horovod.runner import run
from syncline.horovod.torch.elastic.state import StateHandler, get_handler_registry
from syncline.spans import EventLog

SAMPLES, BATCH, EPOCHS, EVERY = 53, 2, 2, 3


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: list[list[int]], own: int | None) -> None:
    """One step: of the mean over all ranks' parts, by one of the ranks or by one worker alone."""
    optimizer.zero_grad()
    for part in parts if own is None else [parts[own]]:
        (model(data()[part]).square().mean() / (len(parts) if own is None else 1)).backward()
    if own is not None:
        for number, parameter in enumerate(model.parameters()):
            hvd.allreduce_(parameter.grad, name=str(number))
    optimizer.step()


def new_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)


def die_once(folder: Path, name: str) -> None:
    if not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, deaths: dict[int, int]) -> dict[str, Any]:
    """`deaths`: a rank for each count of steps, at which it dies before the next commit."""
    hvd.init()
    model, optimizer = new_model()
    if hvd.rank() == 0 and not (folder / "reset").exists():
        model.weight.data.mul_(2)  # others get it by sync
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, ledger=[], sizes=[])
    state.register_reset_callbacks([lambda: (folder / "reset").touch()])

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        state.sizes.append((hvd.size(), len(state.ledger)))
        # A channel over the group that the ranks have just made: also with a rank that is new.
        channel = instrumented(adopt(None, deadline=timedelta(seconds=120)), EventLog(keep=False), deadline_s=120)
        assert len(channel.all_gather(torch.ones(1))) == 3
        while state.epoch < EPOCHS:
            batches = torch.utils.data.BatchSampler(state.sampler, BATCH, drop_last=False)
            for number, batch in enumerate(batches):
                parts = hvd.allgather_object(batch)
                step(model, optimizer, parts, hvd.rank())
                state.ledger.append((state.epoch, parts))
                state.sampler.record_batch(number, BATCH)
                if deaths.get(len(state.ledger)) == hvd.rank():
                    die_once(folder, f"died-{len(state.ledger)}")
                if len(state.ledger) % EVERY == 0:
                    (folder / f"commit-{len(state.ledger)}-{hvd.rank()}").write_text(str(state.ledger))
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    go_on(state)
    return {"ledger": state.ledger, "weight": model.weight.detach(), "rank": hvd.rank(), "sizes": state.sizes}


def test_no_committed_sample_is_lost_when_ranks_die(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 dies after 8 steps, rank 2 of the next world after 13: 6 and 12 were committed last."""
    ranks = run(train, (tmp_path, {8: 0, 13: 2}), num_proc=3, min_num_proc=3)
    assert [found["rank"] for found in ranks] == [0, 1, 2]
    ledger = ranks[0]["ledger"]
    assert all(found["ledger"] == ledger for found in ranks)
    assert ranks[0]["sizes"] == [(3, 0), (3, 6), (3, 12)]
    # What was committed before a rank died is the beginning of what was trained in the end.
    for commit in tmp_path.glob("commit-*"):
        steps = int(commit.name.split("-")[1])
        assert commit.read_text() == str(ledger[:steps])
    for epoch in range(EPOCHS):
        counts = Counter(sample for at, parts in ledger if at == epoch for part in parts for sample in part)
        assert set(counts) == set(range(SAMPLES))
        begins = [epoch] + [at for at, _ in (ledger[6], ledger[12])]
        assert sum(counts.values()) - SAMPLES < 3 * begins.count(epoch), "repeats fill up rounds, once a reset"
    # And the weights are those of one worker that takes the same steps: nothing of a lost step is left in them.
    model, optimizer = new_model()
    model.weight.data.mul_(2)
    for _, parts in ledger:
        step(model, optimizer, parts, None)
    for found in ranks:
        torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-9, atol=1e-12)
    lines = [line for line in capfd.readouterr().err.splitlines() if "reset" in line]
    assert lines == [
        f"syncline: [rank {rank}] killed by SIGKILL. Going on with 3 ranks from the last commit, "
        f"reset {number} of at most 20."
        for rank, number in ((0, 1), (2, 2))
    ]


def grow_and_shrink(slots: Path) -> tuple[list[tuple[int, int]], int]:
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, sizes=[])

    @hvd.elastic.run
    def go_on(state: hvd.elastic.ObjectState) -> None:
        state.sizes.append(hvd.size())
        while len(state.sizes) < 3:
            hvd.barrier()
            state.step += 1
            new = slots.with_name(f"slots-{os.getpid()}")
            new.write_text("3" if len(state.sizes) == 1 else "1")
            new.replace(slots)  # the script reads at any time, and never half a file
            state.commit()

    go_on(state)
    return state.sizes, int(os.environ["HOROVOD_SIZE"])


def test_ranks_come_and_go_as_the_discovery_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from syncline.horovod.runner import Settings, start

    slots, script = tmp_path / "slots", tmp_path / "discover"
    slots.write_text("2")
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {slots})\n")
    script.chmod(0o755)
    monkeypatch.setattr("syncline.launcher.here.elastic._DISCOVER_SECONDS", 0.1)
    settings = Settings(2, discovery_script=str(script), min_num_proc=1, max_num_proc=3)
    assert start((grow_and_shrink, (slots,)), settings, is_script=False) == [([2, 3, 1], 1)]
    assert "There is room for 3 ranks. Going on with 3 ranks" in capfd.readouterr().err
    slots.write_text("0")
    with pytest.raises(UsageError, match="room for 0 ranks, and the run needs 1"):
        start((grow_and_shrink, (slots,)), settings, is_script=False)
    script.write_text("#!/bin/sh\necho node7:2\n")
    with pytest.raises(UsageError, match="host node7 is not this machine"):
        start((grow_and_shrink, (slots,)), settings, is_script=False)


def die_always() -> None:
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

    @hvd.elastic.run
    def go_on(state: hvd.elastic.ObjectState) -> None:
        if hvd.rank() == 1:
            raise ArithmeticError("my own mistake")
        hvd.barrier()

    go_on(state)


def test_limit_of_resets_ends_the_run_with_the_cause() -> None:
    with pytest.raises(RankFailed, match=r"\[rank 1\] ArithmeticError: my own mistake.* reset 1 times, which is the"):
        run(die_always, num_proc=2, reset_limit=1)


def lose_a_rank() -> None:
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)

    @hvd.elastic.run
    def go_on(state: hvd.elastic.ObjectState) -> None:
        if hvd.rank() == 1:
            os._exit(3)
        try:
            hvd.barrier()
        except HorovodInternalError:
            raise KeyError("heard of it") from None

    go_on(state)


def test_without_elastic_flags_a_lost_rank_ends_the_run() -> None:
    with pytest.raises(RankFailed, match=r"\[rank 1\] ended with exit code 3"):
        run(lose_a_rank, num_proc=2)


@pytest.fixture
def alone() -> Any:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("samples", "done", "ranks"), [(10, 0, 3), (10, 8, 3), (10, 9, 4), (10, 10, 3), (0, 0, 2)])
def test_sampler_shares_out_what_is_left(
    samples: int, done: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.horovod.torch.elastic.sampler.size", lambda: ranks)
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr("syncline.horovod.torch.elastic.sampler.rank", lambda rank=rank: rank)
        sampler = hvd.elastic.ElasticSampler(range(samples), seed=3)
        whole = list(sampler.remaining_indices)
        sampler.load_state_dict({"epoch": 0, "processed_num": done})
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    assert sorted(whole) == list(range(samples))
    rounds = [sample for row in zip(*shares, strict=True) for sample in row]
    assert rounds[: samples - done] == whole[done:]
    assert len(rounds) - (samples - done) < ranks
    sampler.record_batch(0, 2)
    assert sampler.processed_num == done + 2 * ranks
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert samples == 0 or sampler.remaining_indices != whole


@pytest.mark.usefixtures("alone")
def test_state_returns_to_its_last_commit_whatever_was_changed_since() -> None:
    model, optimizer = new_model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, seen=[1], epoch=0)
    before = model.weight.detach().clone()

    def advance() -> None:
        step(model, optimizer, [[0, 1]], None)
        scheduler.step()
        state.seen.append(2)
        state.epoch += 1

    for _ in range(2):  # a restored state can be restored again
        advance()
        state.restore()
        assert torch.equal(model.weight, before)
        assert (state.seen, state.epoch, optimizer.param_groups[0]["lr"]) == ([1], 0, 0.05)
        assert optimizer.state_dict()["state"] == {}
    advance()
    state.commit()
    after = model.weight.detach().clone()
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
    advance()
    state.restore()
    assert torch.equal(model.weight, after)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
    assert (state.seen, state.epoch) == ([1, 2], 1)


@pytest.mark.usefixtures("alone")
def test_users_may_register_a_handler_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    from syncline.horovod.torch.elastic import state as states

    monkeypatch.setattr(states, "_registry", [*get_handler_registry(), (Counting, StateHandler)])
    counting = Counting()
    state = hvd.elastic.TorchState(counting=counting)
    counting.count = 5
    state.restore()
    assert (state.counting is counting, counting.count) == (True, 0)
