"""Read CIFAR-10 from disk and check that every byte is the published one.

Two layouts are accepted: the official Python batches (`data_batch_1` to `data_batch_5`, `test_batch`; some of
the training batches are enough) and the four .npy files that `syncline data cifar10` leaves in the cache.

The official batches are pickles, and a pickle can run any code. Here a pickle can only describe an array:
each name that it may mention stands for a small recorder in this file, and every other name is refused.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError
from syncline.workload.data.images import CIFAR10_DEVIATION, CIFAR10_MEAN, ImageSet, Pixels

BATCHES_FOLDER = "cifar-10-batches-py"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
ARRAY_NAMES = ("train_images", "train_labels", "test_images", "test_labels")
REPAIR = "Delete it and run `syncline data cifar10`."

# (pixels, labels) of each batch: SHA-256 of the uint8 bytes in the official order.
BATCH_SHA256 = {
    "data_batch_1": (
        "a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21",
        "d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9",
    ),
    "data_batch_2": (
        "0b825e5592c3b72ea18d6ec2ff5f5b19d33e41a75f5039054a9bb87be3cf69a0",
        "5d18f7371ed35ea9ade77952fe958b0660a45cd6c8b8a8970030f21612cfd7e3",
    ),
    "data_batch_3": (
        "c6ee1dd4601a69ec085d8ebf53ee6441775491a6839a0a9ae8fa198e88a3a429",
        "32cf77b0ee2e790b1c4384d2d82e42dc1571b87e67f6da8f444b2725b2973f65",
    ),
    "data_batch_4": (
        "1f6b6c799cff375a9f8fae2fac909d51ee09f38a6a60eebb9e8fec6f47ddc48f",
        "d2815e3f8f656272864920fc0edde56b04ec9cf81bf397c0dd3069f4aea51aeb",
    ),
    "data_batch_5": (
        "58e3bbf713e28357476a351d3a05d056372f94c681d04ca9d62a076fdf2a643b",
        "2ddf3ab27d5d04409c94ce7b56849c243129c10de1058ae0bfe14c77e934800c",
    ),
    "test_batch": (
        "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}

# The same for the whole parts, all five training batches one after the other.
WHOLE_SHA256 = {
    "train_images": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
    "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test_images": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
    "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}


@dataclass(frozen=True)
class Arrays:
    """CIFAR-10 as it is hashed and stored: everything uint8, labels too."""

    train_images: Pixels
    train_labels: npt.NDArray[np.uint8]
    test_images: Pixels
    test_labels: npt.NDArray[np.uint8]


def find_folder(folder: Path) -> Path | None:
    """The folder itself or its `cifar-10-batches-py`, whichever holds CIFAR-10 files; nothing is read yet."""
    for candidate in (folder, folder / BATCHES_FOLDER):
        if holds_arrays(candidate) or _present_batches(candidate):
            return candidate
    return None


def read_cifar10(folder: Path) -> ImageSet:
    """All that the folder holds, in memory and verified; DataError says what is missing or wrong."""
    found = find_folder(folder)
    if found is None:
        raise DataError(
            f"{folder} holds no CIFAR-10: neither {TRAIN_BATCHES[0]} nor {ARRAY_NAMES[0]}.npy is in it.",
            action=f"Point to the folder that holds {BATCHES_FOLDER}, or run `syncline data cifar10`.",
        )
    if holds_arrays(found):
        arrays = Arrays(**{name: _read_array(found / f"{name}.npy", name) for name in ARRAY_NAMES})
    else:
        arrays = _read_batches(found)
    return ImageSet(
        name="cifar10",
        source=_describe(found, len(arrays.train_images), len(arrays.test_images)),
        train_images=arrays.train_images,
        train_labels=arrays.train_labels.astype(np.int64),
        test_images=arrays.test_images,
        test_labels=arrays.test_labels.astype(np.int64),
        num_classes=10,
        mean=CIFAR10_MEAN,
        deviation=CIFAR10_DEVIATION,
    )


def _describe(folder: Path, num_train: int, num_test: int) -> str:
    missing = [] if holds_arrays(folder) else [name for name in TRAIN_BATCHES if not (folder / name).is_file()]
    note = f" (without {', '.join(missing)})" if missing else ""
    counts = f"{num_train:,} training{note} and {num_test:,} test images"
    return f"CIFAR-10 from {folder}: {counts}, checked by SHA-256."


def holds_arrays(folder: Path) -> bool:
    """Whether all four .npy files are there; nothing is read yet."""
    return all((folder / f"{name}.npy").is_file() for name in ARRAY_NAMES)


def _present_batches(folder: Path) -> list[str]:
    return [name for name in (*TRAIN_BATCHES, TEST_BATCH) if (folder / name).is_file()]


def _read_array(path: Path, name: str) -> npt.NDArray[np.uint8]:
    try:
        array: npt.NDArray[np.uint8] = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(f"{path} cannot be read as a .npy file: {error}.", action=REPAIR) from error
    tail = (3, 32, 32) if name.endswith("images") else ()
    if array.dtype != np.uint8 or array.ndim != 1 + len(tail) or array.shape[1:] != tail:
        found = f"{array.dtype} {list(array.shape)}"
        raise DataError(f"{path} holds {found}, not the {name} of CIFAR-10.", action=REPAIR)
    check_sha256(array, WHOLE_SHA256[name], str(path), REPAIR)
    return array


def _read_batches(folder: Path) -> Arrays:
    names = _present_batches(folder)
    if TEST_BATCH not in names or len(names) == 1:
        missing = TEST_BATCH if TEST_BATCH not in names else "every training batch (data_batch_1 to data_batch_5)"
        raise DataError(f"{folder} lacks {missing}.", action="Add what is missing, or run `syncline data cifar10`.")
    return join_batches(names, lambda name: decode_batch(_read_bytes(folder / name), str(folder / name), name))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", action="Check its permissions.") from error


Batch = tuple[Pixels, npt.NDArray[np.uint8]]


def join_batches(names: list[str], read: Callable[[str], Batch]) -> Arrays:
    """Training batches in the given order, then the test batch; `names` holds at least one of each."""
    train = [read(name) for name in names if name != TEST_BATCH]
    # Decoded batches are read-only views of the file's bytes; joining makes copies that torch may wrap.
    images = np.concatenate([pixels for pixels, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    test_images, test_labels = read(TEST_BATCH)
    return Arrays(images, labels, test_images.copy(), test_labels.copy())


def decode_batch(raw: bytes, where: str, name: str, action: str = REPAIR) -> Batch:
    """Pixels and labels of one official batch, checked. `where` names the file in messages."""
    try:
        content = _DescriptionUnpickler(raw, where, action).load()
        named = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        pixels = named["data"].values.reshape(-1, 3, 32, 32)
        labels = np.array(named["labels"], dtype=np.uint8)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        cause = f"it is truncated or damaged ({type(error).__name__}: {error})"
        raise DataError(f"{where} is not an official CIFAR-10 batch: {cause}.", action=action) from error
    check_sha256(pixels, BATCH_SHA256[name][0], f"{where} (pixels)", action)
    check_sha256(labels, BATCH_SHA256[name][1], f"{where} (labels)", action)
    return pixels, labels


def check_sha256(array: npt.NDArray[np.uint8], expected: str, where: str, action: str) -> None:
    """DataError unless the array's bytes, row by row, are the published ones."""
    if hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() != expected:
        count = f"{len(array):,} entries"
        raise DataError(f"{where} differs from the official CIFAR-10 ({count}, wrong SHA-256).", action=action)


class _DescribedArray:
    """Stands in for numpy's `_reconstruct`: records the array that the pickle describes."""

    def __init__(self, *_ignored: object) -> None:
        self.values: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, _kind, is_fortran, raw = state
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _DescribedType:
    """Stands in for `numpy.dtype`: bytes are the only kind of number that CIFAR-10 holds."""

    def __init__(self, code: str | bytes, *_ignored: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of {code!r} instead of bytes")

    def __setstate__(self, _state: tuple[Any, ...]) -> None:
        pass


def _encode(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes into a protocol-2 pickle


class _DescriptionUnpickler(pickle.Unpickler):
    allowed: dict[tuple[str, str], object] = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): _DescribedArray,
        ("numpy._core.multiarray", "_reconstruct"): _DescribedArray,
        ("numpy", "ndarray"): _DescribedArray,
        ("numpy", "dtype"): _DescribedType,
        ("_codecs", "encode"): _encode,
    }

    def __init__(self, raw: bytes, where: str, action: str) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self.where = where
        self.action = action

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.allowed:
            asked = f"its pickle asks for {module}.{name}, which no CIFAR-10 file needs"
            raise DataError(f"{self.where} was refused: {asked}.", action=self.action)
        return self.allowed[module, name]
