"""What the quick form of a study leaves out or makes smaller, in words: nobody should mistake it for the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from syncline.study.cells import merged
from syncline.study.file import Stage, Study

SUBSTANCE = ("model", "data", "image_size", "global_batch")
"""Changes that make it another experiment: the title names them."""
WORDS = {
    "global_batch": "global batch",
    "batch_per_worker": "batch per worker",
    "batch_per_node": "batch per node",
    "image_size": "image size",
    "measure.warmup": "warm-up steps",
    "measure.calibration": "recorded steps",
    "measure.block": "steps a turn",
    "test_samples": "test samples",
    "options.bucket_cap_mb": "bucket MB",
    "methods": "without",
}
INDIFFERENT = ("measure.warmup", "measure.calibration", "measure.block", "log_every")
"""How it is measured, not what."""


def title(study: Study, *, quick: bool) -> str:
    """The study's; with what the quick form replaces."""
    if not quick:
        return study.title
    changed: dict[tuple[str, str], list[str]] = {}
    said: set[tuple[str, str]] = set()
    for stage in study.stage:
        for key, new, old in _changes(study, stage) if not stage.quick.skip else ():
            if key in SUBSTANCE and (key, new) not in said:
                said.add((key, new))
                changed.setdefault((WORDS.get(key, key), old), []).append(new)
    texts = [f"{word} {' and '.join(new)}{old}" for (word, old), new in changed.items()]
    return f"{study.title} (quick form{': ' if texts else ''}{', '.join(texts)})"


def differences(study: Study) -> list[str]:
    """What the quick form changes and where: what it changes alike in several stages is said once."""
    runs = [stage for stage in study.stage if not stage.quick.skip]
    where: dict[str, list[str]] = {}
    for stage in runs:
        for key, new, old in _changes(study, stage):
            if key not in INDIFFERENT:
                where.setdefault(_changed(key, new, old), []).append(stage.name)
    together: dict[tuple[str, ...], list[str]] = {}
    for change, stages in where.items():
        together.setdefault(tuple(stages), []).append(change)
    changed = [
        f"{'everywhere' if len(runs) > 1 and len(stages) == len(runs) else _text(list(stages))}: {', '.join(changes)}"
        for stages, changes in sorted(together.items(), key=lambda item: -len(item[0]))
    ]
    return [*changed, *(f"{stage.name}: left out, {stage.quick.skip}" for stage in study.stage if stage.quick.skip)]


def _changed(key: str, new: str, old: str) -> str:
    word = WORDS.get(key, key.rpartition(".")[2].replace("_", " "))
    return " ".join(filter(None, [word, new])) + old


def _changes(study: Study, stage: Stage) -> Iterator[tuple[str, str, str]]:
    """Of all that the quick form has other than the whole study: the key, what it has, and what it has that instead
    of."""
    whole = {**merged(study.plan, stage.plan), **stage.grid}
    quick = {**merged(study.plan, study.quick, stage.plan, stage.quick.plan), **stage.grid, **stage.quick.grid}
    for key, value in quick.items():
        if value != whole.get(key):
            yield key, _text(value), _instead(key, whole)
    left_out = [name for name in stage.methods if stage.quick.methods and name not in stage.quick.methods]
    if left_out:
        yield "methods", _text(left_out), ""
    if stage.quick.rounds is not None and stage.quick.rounds != stage.rounds:
        yield "rounds", str(stage.quick.rounds), f" instead of {stage.rounds}"
    if stage.quick.variants and stage.quick.variants != stage.variants:
        yield "variants", " | ".join(stage.quick.variants), f" instead of {' | '.join(stage.variants)}"


def _instead(key: str, whole: Mapping[str, Any]) -> str:
    other = {"steps": "epochs", "epochs": "steps"}.get(key, "")
    if key in whole:
        images = key == "data" and whole[key] == "auto"
        return f" instead of {'CIFAR-10' if images else _text(whole[key])}"
    return f" instead of {other} {_text(whole[other])}" if other in whole else ""


def _text(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    words = [str(item) for item in value]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
