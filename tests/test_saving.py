"""save and load: a script goes on to the last bit, from one whole file that plain torch can read."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from helpers import MANY_WORKERS, assert_same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import syncline
from syncline.errors import UsageError

METHODS = ["bucketed", "shared-memory", "all-reduce", "ddp"]


def dataset() -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(22, 6, generator=stream), torch.randint(3, (22,), generator=stream))


class Net(nn.Module):
    """Batch norm, dropout, and a buffer that a state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, values: Tensor) -> Any:
        self.calls += 1
        return self.layers(values) * (1 + 0.01 * self.calls)


class Script:
    """What a user has in a loop; augmentation draws from all three generators."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = wrap(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = syncline.loader(dataset(), global_batch=8)
        self.parts = (self.model, self.optimizer, self.scheduler, self.loader)
        self.steps = 0

    def run(self, until: int, at_step: Callable[[], None] = lambda: None) -> None:
        while self.steps < until:
            for inputs, targets in self.loader:
                inputs = inputs + 0.1 * torch.randn(()) + random.random() + np.random.randn()
                nn.functional.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
                at_step()
                if self.steps >= until:
                    return
            self.scheduler.step()

    def weights(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


def resumed(wrap: Callable[[nn.Module], nn.Module], path: Path, seed: int, stop: int = 4) -> list[dict[str, Tensor]]:
    """Weights after eight steps: of a script that saves after some, and of another one that loads that."""
    whole = Script(wrap, seed)

    def save() -> None:
        if whole.steps == stop:
            syncline.save(path, *whole.parts, steps=whole.steps)

    whole.run(8, save)
    other = Script(wrap, seed + 100)
    other.run(2)
    other.steps = syncline.load(path, *other.parts)["steps"]
    other.run(8)
    return [whole.weights(), other.weights()]


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_alone_a_script_goes_on_to_the_last_bit(tmp_path: Path, stop: int) -> None:
    assert_same(*resumed(lambda model: model, tmp_path / "last.pt", 3, stop))


def resume_on_a_rank(folder: str) -> dict[str, list[dict[str, Tensor]]]:
    results = {}
    for method in METHODS:
        path = Path(folder) / f"{method}.pt"
        rank = syncline.DataParallel(nn.Linear(1, 1), "all-reduce").rank
        results[method] = resumed(lambda model, method=method: syncline.DataParallel(model, method), path, rank)  # type: ignore[misc]
    results["torch"] = resumed(DistributedDataParallel, Path(folder) / "torch.pt", rank)
    return results


@pytest.mark.parametrize("workers", [2, 3])
def test_on_many_ranks_a_script_goes_on_to_the_last_bit(workers: int, tmp_path: Path) -> None:
    """Each rank has batch-norm buffers and random draws of its own. Ddp and three ranks are left out: torch lays out
    its buckets anew after the first backward, and then sums in another order."""
    assert set(METHODS) <= set(MANY_WORKERS)
    by_rank = syncline.launch(resume_on_a_rank, str(tmp_path), workers=workers, threads=1)
    for method in by_rank[0]:
        whole, again = by_rank[1][method]
        if workers == 2 or method not in ("ddp", "torch"):
            assert_same(again, whole)
        buffer = next(name for name in whole if name.endswith("running_mean"))
        if method in ("bucketed", "shared-memory", "all-reduce"):
            assert not torch.equal(whole[buffer], by_rank[0][method][0][buffer]), (
                "ranks must differ for this to say much"
            )
        plain = torch.load(tmp_path / f"{method}.pt")
        Net().load_state_dict(plain["model"])
        assert plain["steps"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.pt" for name in by_rank[0])


SCRIPT = """
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import syncline

path, stop, own_group = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
if own_group:
    dist.init_process_group("gloo")
assert syncline.gather(len(sys.argv)) == [len(sys.argv)] * 2, "before there is any wrapper"
torch.manual_seed(0)
samples = torch.randn(13, 4), torch.randint(3, (13,))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
model = syncline.DataParallel(model, "bucketed")
torch.manual_seed(model.rank)
optimizer = torch.optim.AdamW(model.parameters())
loader = syncline.loader(TensorDataset(*samples), global_batch=5)
parts = (path, model, optimizer, None, loader)
if os.path.exists(path):
    assert syncline.load(*parts) == {"note": "kept"}
while loader.epoch < 3:
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = syncline.mean(loss.item())
        if (loader.epoch, loader.step) == (1, stop):
            syncline.save(*parts, note="kept")
            sys.exit()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(weights).hexdigest()
if model.rank == 0:
    print(f"result {digest} {loss}")
"""


def test_a_script_is_stopped_under_one_launcher_and_goes_on_under_another(cli: Cli, tmp_path: Path) -> None:
    """In new processes, with uneven shards; torchrun's script makes the process group by itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", str(script)]

    def launch(path: Path, stop: int) -> str:
        done = cli("launch", script, "--workers", "2", "--threads", "1", "--", path, stop)
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = launch(tmp_path / "never.pt", 0)
    assert whole.startswith("result ")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [*torchrun, str(tmp_path / "last.pt"), "2", "own group"]
    stopped = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert stopped.returncode == 0, stopped.stderr
    assert (tmp_path / "last.pt").exists()
    assert "result" not in stopped.stdout
    assert launch(tmp_path / "last.pt", 0) == whole


def test_any_part_with_a_state_and_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "new" / "all.pt"
    ema, scaler = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)), torch.amp.GradScaler("cpu", init_scale=64.0)
    syncline.save(path, nn.Linear(3, 3), ema=ema, scaler=scaler, epoch=3, best={"accuracy": 0.5})
    model, other = nn.Linear(3, 3), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    scaler = torch.amp.GradScaler("cpu")
    rest = syncline.load(path, model, ema=other, scaler=scaler)
    assert rest == {"epoch": 3, "best": {"accuracy": 0.5}}
    assert_same(dict(other.state_dict()), dict(ema.state_dict()))
    assert scaler.get_scale() == 64.0
    assert torch.load(path)["epoch"] == 3


def test_a_copy_of_a_wrapper_that_has_not_met_the_others_yet(tmp_path: Path) -> None:
    wrapper = syncline.DataParallel(nn.Linear(2, 2), "all-reduce")
    average = copy.deepcopy(wrapper)
    syncline.save(tmp_path / "last.pt", wrapper, average=average)
    again = copy.deepcopy(wrapper)
    again.module.weight.data.zero_()
    syncline.load(tmp_path / "last.pt", again, average=copy.deepcopy(average))
    assert_same(dict(again.state_dict()), dict(average.state_dict()))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["cut off", "other", "changed"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "last.pt"
    model = nn.Linear(2, 2)
    before = dict(model.state_dict())
    syncline.save(path, nn.Linear(2, 2))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"torch", b"tarch") if content is None else content or whole[:-300])
    with pytest.raises(UsageError, match=r"last\.pt: it is damaged"):
        syncline.load(path, model)
    assert_same(dict(model.state_dict()), before)


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", nn.Linear(2, 2)
    syncline.save(path, model)
    with pytest.raises(UsageError, match="there is no such file"):
        syncline.load(tmp_path / "gone.pt", model)
    with pytest.raises(UsageError, match=r"has no optimizer\. It has model"):
        syncline.load(path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UsageError, match=r"differs from that of the checkpoint .* first in 'bias'"):
        syncline.load(path, nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"first in '1\.bias'"):
        syncline.load(path, nn.ModuleDict({"1": nn.Linear(2, 2)}))
    with pytest.raises(UsageError, match="epoch cannot load a state"):
        syncline.load(path, model, epoch=3)
    with pytest.raises(UsageError, match="'syncline' is taken"):
        syncline.save(path, model, syncline=1)
    torch.save(model.state_dict(), path)
    with pytest.raises(UsageError, match=r"syncline\.save did not write it"):
        syncline.load(path, model)
    torch.save({"syncline": {"format": 99}}, path)
    with pytest.raises(UsageError, match="its format is 99"):
        syncline.load(path, model)


def test_objects_of_other_classes_need_trust(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", nn.Linear(2, 2)
    syncline.save(path, model, arguments=Path("data"))
    with pytest.raises(UsageError, match="give weights_only=False"):
        syncline.load(path, model)
    assert syncline.load(path, model, weights_only=False) == {"arguments": Path("data")}


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", nn.Linear(2, 2)
    syncline.save(path, model, epoch=1)
    with pytest.raises(UsageError, match=r"cannot write the checkpoint .*last\.pt: .*pickle"):
        syncline.save(path, model, function=lambda: None)
    assert syncline.load(path, model)["epoch"] == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        syncline.save(tmp_path / "file" / "last.pt", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "last.pt"]


def save_badly(folder: str) -> str:
    syncline.DataParallel(nn.Linear(2, 2), "all-reduce")
    with pytest.raises(UsageError) as caught:
        syncline.save(Path(folder) / "file" / "last.pt", nn.Linear(2, 2))
    with pytest.raises(UsageError) as missing:
        syncline.load(Path(folder) / "gone.pt", nn.Linear(2, 2))
    return f"{caught.value} {missing.value}"


def test_every_rank_hears_what_went_wrong_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in syncline.launch(save_badly, str(tmp_path), workers=2, threads=1):
        assert "cannot write" in text
        assert "no such file" in text


def save_on_a_rank(path: str) -> None:
    syncline.save(path, syncline.DataParallel(nn.Linear(2, 2)), epoch=1)


def test_loading_on_another_number_of_ranks_warns(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    syncline.launch(save_on_a_rank, str(path), workers=2, threads=1)
    with pytest.warns(UserWarning, match="saved on 2 ranks and is loaded on 1"):
        assert syncline.load(path, nn.Linear(2, 2)) == {"epoch": 1}
