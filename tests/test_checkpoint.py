"""Checkpoints that cannot be gone on from. That runs go on from good ones to the bit: test_training, test_faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import on_threads
from test_step import make_worker

from syncline.errors import RunFolderError
from syncline.training import checkpoint


def load(folder: Path) -> None:
    on_threads(1, lambda comm, log: checkpoint.load(folder, make_worker("mlp", "single", comm, log), comm))


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    torch.save({"format": checkpoint.FORMAT - 1}, tmp_path / "step-00000003" / "rank-0.pt")
    words = f"rank-0.pt has checkpoint format {checkpoint.FORMAT - 1}, this version reads {checkpoint.FORMAT}"
    with pytest.raises(RunFolderError, match=words):
        load(tmp_path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    path = tmp_path / "step-00000003" / "rank-0.pt"
    torch.save({"format": checkpoint.FORMAT, "parameters": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(RunFolderError, match="cannot read the checkpoint"):
        load(tmp_path)
