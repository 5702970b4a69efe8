"""The words that users type: methods and their options, models, data, recipes.

They stand here so that a wrong one is refused in milliseconds, before torch is loaded. A test keeps these tables
equal to what the stages implement.
"""

from __future__ import annotations

from typing import Any

METHODS = {
    "single": "one worker on the whole batch: the baseline, nothing is sent",
    "gather-scatter": "each gradient is gathered on rank 0, averaged there and scattered back",
    "point-to-point": "the same exchange with rank 0 as sends and receives that are in flight together",
    "all-reduce": "each gradient is all-reduced by itself, after backward",
    "ddp": "PyTorch's own DistributedDataParallel: the outside control",
    "bucketed": "buckets of gradients are all-reduced while backward still runs",
    "ring": "bucketed, each bucket passed around a ring",
    "tree": "bucketed, each bucket summed up a binary tree and handed down again",
    "halving-doubling": "bucketed, each bucket by recursive halving and doubling",
    "shared-memory": "ranks of one host average in memory that they share; nothing is sent",
    "hierarchical": "shared memory within each host, bucketed between one leader of each",
    "data-parallel": "one process, a replica of the model on a thread for each worker; DataParallel on GPUs",
    "mpi": "bucketed over MPI, started through mpiexec",
    "auto": "shared-memory where all ranks are on one host, bucketed otherwise",
}
IN_ONE_PROCESS = "data-parallel"
"""The method whose workers are threads of one rank."""
ON_ONE_HOST = ("mpi", "shared-memory", IN_ONE_PROCESS)
"""Methods for ranks of one host."""
_BUCKETED = ("bucket_cap_mb", "transfer_dtype", "groups", "overlap", "unused")
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "ddp": ("bucket_cap_mb",),
    "bucketed": (*_BUCKETED, "collective"),
    "ring": _BUCKETED,
    "tree": _BUCKETED,
    "halving-doubling": _BUCKETED,
    "shared-memory": ("unused",),
    "hierarchical": ("bucket_cap_mb", "transfer_dtype", "overlap", "unused", "collective"),
    "mpi": ("bucket_cap_mb", "transfer_dtype", "overlap", "unused", "collective"),
    "auto": ("unused",),
}
"""The options that each method takes; the others take none."""
MODELS = {
    "vgg11": "VGG-11 for 32x32 images with batch norm, 9,231,114 parameters",
    "vgg11-quarter": "VGG-11 with a quarter of the channels, 579,786 parameters",
    "vgg16": "VGG-16 for 224x224 images, 138,357,544 parameters",
    "resnet18": "ResNet-18 for 32x32 images, 11,173,962 parameters",
    "resnet18-imagenet": "ResNet-18 for 224x224 images, 11,689,512 parameters",
    "resnet50": "ResNet-50 for 224x224 images, 25,557,032 parameters",
    "inception-v3": "Inception-v3 for 299x299 images with its auxiliary head, 27,161,264 parameters",
    "bert-base": "BERT that guesses masked tokens, 12 layers, 109,514,298 parameters",
    "bert-small": "BERT that guesses masked tokens, 4 layers, 28,795,194 parameters",
    "cnn": "a small convolutional network without batch norm: equal to one worker in every digit that counts",
    "mlp": "two linear layers: the smallest thing that learns",
}
DATA = {
    "auto": "CIFAR-10 where it is at hand or quickly fetched and the model is for such images, otherwise synthetic",
    "cifar10": "CIFAR-10, 32x32 colour images in 10 classes",
    "synthetic": "made up to fit the model: images of its size and classes, or texts",
    "synthetic-ages": "made-up images with ages 0 to 100",
    "imdb-wiki": "faces and their age, from the folder with wiki.mat or imdb.mat (data_dir)",
    "folder": "images in a folder per class, as ImageNet, Imagenette and Tiny-ImageNet have them (data_dir)",
    "text": "a text file, or a folder of them (data_dir), with tokens made from it: guess the masked ones",
}
IN_FILES = ("imdb-wiki", "folder")
"""Data whose images stay in their files and are decoded when a batch needs them."""

RECIPES: dict[str, dict[str, Any]] = {
    "course": {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "fast": {
        "learning_rate": 0.02, "linear_scaling": True, "schedule": "one-cycle", "peak_at": 0.25,
        "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_all": False,
        "label_smoothing": 0.1, "init": "kaiming-fan-out",
    },
    "large-batch": {
        "learning_rate": 0.02, "linear_scaling": True, "schedule": "cosine", "warmup": "gradual",
        "warmup_epochs": 2.0, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_all": False,
        "label_smoothing": 0.1, "init": "kaiming-fan-out",
    },
}  # fmt: skip
"""Optimiser settings by name; what a recipe does not say is as in Optimizer. docs/recipes.md says why each."""
RECIPES_OF_TEN_EPOCHS: dict[str, dict[str, Any]] = {"fast": {"learning_rate": 0.05}}
"""What is different where a run has ten epochs or more: its ramp is slower and bears a higher peak."""
