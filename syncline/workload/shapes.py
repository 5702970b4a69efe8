"""The data of a plan that is not a set of images in memory: made data that fits the model, and texts."""

from __future__ import annotations

from pathlib import Path

from syncline.plan import Plan
from syncline.workload.batches import Batches
from syncline.workload.inputs import image_size, sequence_length, usual_input
from syncline.workload.made_images import MadeImages
from syncline.workload.made_text import made_texts
from syncline.workload.masking import MaskedTexts
from syncline.workload.models import num_masked
from syncline.workload.tasks import Task, age_estimation, classification, masked_language
from syncline.workload.text import read_text

SHAPES = ("synthetic", "synthetic-ages", "text")


def synthetic_task(plan: Plan) -> Task:
    """The model's usual one, changed as the plan says."""
    usual = usual_input(plan.model)
    classes = plan.num_classes or usual.num_classes
    if usual.unit == "tokens":
        length = sequence_length(plan)
        return masked_language(classes, length, num_masked(length))
    shape = (3, image_size(plan), image_size(plan))
    return age_estimation(shape) if plan.data == "synthetic-ages" else classification(classes, shape)


def made_batches(plan: Plan) -> Batches:
    """Data made up for the model: images, ages or texts."""
    task = synthetic_task(plan)
    if task.unit == "tokens":
        return made_texts(task, seed=plan.seed)
    return MadeImages(task, seed=plan.seed, channels_last=plan.channels_last)


def text_batches(plan: Plan) -> Batches:
    """The plan's text file, in texts of its sequence length."""
    length = sequence_length(plan)
    text = read_text(Path(plan.data_dir or ""), length)
    train, test = text.windows(length)
    return MaskedTexts(
        masked_language(text.vocabulary, length, num_masked(length)),
        train=lambda numbers: train[numbers].astype("int64"),
        test=lambda numbers: test[numbers].astype("int64"),
        num_train=len(train),
        num_test=len(test),
        source=f"{text.source}; {len(train):,} texts of {length} tokens to train and {len(test):,} to test on.",
        seed=plan.seed,
    )
