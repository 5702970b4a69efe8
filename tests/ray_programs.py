"""What the tests of Ray start as processes of their own, so that Ray's threads and handlers are not the tests'.

    python ray_programs.py cluster      two nodes of two CPUs; prints the address; ends when its standard input does
    python ray_programs.py inside ADDRESS FOLDER    a program that uses Ray itself, and Syncline in it

Each prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import syncline


def cluster() -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2, node_ip_address="127.0.0.1", include_dashboard=False)
        print(json.dumps(nodes.address), flush=True)
        sys.stdin.read()
    finally:
        nodes.shutdown()


def who() -> tuple[int, int, int, int]:
    """A rank's place, from a group that it makes of what it was given."""
    dist.init_process_group("gloo")
    ranks = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(ranks)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(os.environ["NODE_RANK"]), torch.get_num_threads(), int(ranks)


def mean_gradient(config: Mapping[str, Any]) -> None:
    """In Ray Train's group: the gradient of rank r alone is r + 1."""
    from ray import train

    place = train.get_context()
    model = syncline.DataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(place.get_world_rank() + 1))).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    Path(config["folder"], f"gradient-{place.get_world_rank()}").write_text(str(gradient.item()))


def inside(address: str, folder: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=address, log_to_driver=False)
    ranks = syncline.launch(who, workers=2, threads=1, engine="ray")
    stays = ray.is_initialized()
    TorchTrainer(
        mean_gradient,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
    gradients = [float(Path(folder, f"gradient-{rank}").read_text()) for rank in range(2)]
    ray.shutdown()
    print(json.dumps({"ranks": ranks, "stays": stays, "gradients": gradients}))


if __name__ == "__main__":
    {"cluster": cluster, "inside": inside}[sys.argv[1]](*sys.argv[2:])
