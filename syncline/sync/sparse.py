"""Sparse gradients, as embeddings with `sparse=True` have them: ranks exchange the rows that they touched."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator


def sparse_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse, as their modules say."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return {id(layer.weight) for layer in layers if layer.sparse}


def average_sparse(communicator: Communicator, name: str, gradient: Tensor) -> None:
    """Replace a sparse gradient by its mean over ranks, in place: the rows of all ranks, in rank order. Collective.

    Ranks touch different numbers of rows, and a message has one size: each sends as many rows as the longest has.
    """
    own = gradient.coalesce()
    device = communicator.device
    lengths = communicator.all_gather(torch.tensor([own._nnz()], device=device), label=f"rows of {name}")
    longest = int(torch.cat(lengths).max())
    indices = torch.zeros(own.sparse_dim(), longest, dtype=torch.int64, device=device)
    values = torch.zeros(longest, *own.values().shape[1:], dtype=own.dtype, device=device)
    indices[:, : own._nnz()] = own.indices()
    values[: own._nnz()] = own.values()
    all_indices = communicator.all_gather(indices, label=f"indices of {name}")
    all_values = communicator.all_gather(values, label=name)
    counts = [int(length) for length in lengths]
    mean = torch.sparse_coo_tensor(
        torch.cat([part[:, :count] for part, count in zip(all_indices, counts, strict=True)], dim=1),
        torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)]) / communicator.world_size,
        own.shape,
        check_invariants=False,  # torch warns where nobody says
    ).coalesce()
    with torch.no_grad():
        gradient.copy_(mean.to(gradient.device))


def no_rows(parameter: Tensor) -> Tensor:
    """The sparse gradient of a rank that touched no row."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
