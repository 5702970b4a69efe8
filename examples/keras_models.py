"""Train a Keras 3 model on many workers, in a loop of one's own.

    pip install keras
    syncline launch examples/keras_models.py --workers 2
    syncline launch examples/keras_models.py --workers 2 -- --model ResNet50 --batch 8

Keras must use torch (KERAS_BACKEND=torch), and `training=True` must be passed on: `model.train()` alone does not
reach Keras's layers. DataParallel gives every rank rank 0's batch-norm statistics before each step, as with torch's.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
import torch.nn.functional as F

import syncline

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", default="small", help="small, or a name of keras.applications: ResNet50, InceptionV3, VGG16"
)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=8, help="images of each rank")
args = parser.parse_args()


def small():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(momentum=0.5),
            layers.Activation("relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


class Training(torch.nn.Module):
    """A Keras model whose mode is that of torch: `train()` and `eval()` decide."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images, training=self.training)


if args.model == "small":
    network, side = small(), 16
else:
    side = 96 if args.model == "InceptionV3" else 64
    build = getattr(keras.applications, args.model)
    network = build(weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None)
model = syncline.DataParallel(Training(network))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
rank, workers = model.communicator.rank, model.communicator.world_size
random = torch.Generator().manual_seed(rank)
for step in range(args.steps):
    labels = torch.randint(10, (args.batch,), generator=random)
    images = torch.randn(args.batch, side, side, 3, generator=random) + labels[:, None, None, None] / 5
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    mean = syncline.mean(loss.item())
    if rank == 0:
        print(f"step {step}: loss {mean:.4f} on {workers} workers", flush=True)
