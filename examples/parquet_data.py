"""A parquet file as your own data, for the command line and for a script.

In this folder:

    python parquet_data.py                                                        # writes petals.parquet, 2,000 rows
    syncline train --data parquet_data:petals --data-dir petals.parquet --model parquet_data:Net --epochs 3
    syncline compare --data parquet_data:petals --data-dir petals.parquet --model parquet_data:Net

With Hugging Face's datasets (pip install datasets) the same file is `parquet_data:petals_of_hugging_face`.
"""

import math
from pathlib import Path

import numpy as np
import polars
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import syncline

FEATURES = ["length", "width", "weight", "shade"]
KINDS = 3


def petals(data_dir: Path) -> syncline.Data:
    """What `--data` names: called on every rank with the path of --data-dir."""
    table = polars.read_parquet(data_dir)
    inputs = torch.from_numpy(table.select(FEATURES).to_numpy().astype(np.float32))
    targets = torch.from_numpy(table["kind"].to_numpy().astype(np.int64))
    train, test = random_split(TensorDataset(inputs, targets), [0.9, 0.1], torch.Generator().manual_seed(0))
    return syncline.Data(train, test, loss=smoothed_loss, metric=margin, num_classes=KINDS, draws=False)


def petals_of_hugging_face(data_dir: Path) -> syncline.Data:
    """The same rows as a datasets.Dataset: `rows[number]` is a dictionary, which `collate` makes into a pair."""
    import datasets

    rows = datasets.load_dataset("parquet", data_files=str(data_dir), split="train").with_format("torch")
    parts = rows.train_test_split(0.1, seed=0)
    return syncline.Data(parts["train"], parts["test"], num_classes=KINDS, collate=collate, draws=False)


def collate(rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs = torch.stack([torch.stack([row[name] for name in FEATURES]) for row in rows])
    return inputs.float(), torch.stack([row["kind"] for row in rows])


def smoothed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Your own loss: the mean over the given samples."""
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Your own metric: how much likelier the right kind is than chance, on average."""
    return outputs.softmax(1).gather(1, targets[:, None]).mean() * KINDS


class Net(nn.Module):
    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(math.prod(input_shape), 32), nn.ReLU(), nn.Linear(32, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def write(path: Path) -> None:
    stream = np.random.default_rng(0)
    kinds = stream.integers(KINDS, size=2000)
    middles = stream.normal(size=(KINDS, len(FEATURES)))
    values = middles[kinds] + 0.7 * stream.normal(size=(2000, len(FEATURES)))
    polars.DataFrame({"kind": kinds, **dict(zip(FEATURES, values.T, strict=True))}).write_parquet(path)


if __name__ == "__main__":
    write(Path("petals.parquet"))
