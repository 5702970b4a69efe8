"""loader: any data, divided among ranks so that together they see the batches that one worker would see.

    loader = syncline.loader(dataset, global_batch=256)
    for inputs, targets in loader:
        loss_of(model(inputs), targets).backward()

Each rank gets a contiguous part of every global batch. Parts may differ in size; the loader notes how much each
weighs, and `syncline.DataParallel` scales the gradients by it, so that their average is the mean over the global
batch. The loss that the loop prints is the rank's own; `syncline.mean` gives the one over the global batch.

Loading is torch's DataLoader: its keywords (num_workers, collate_fn, pin_memory, …) are accepted as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from syncline import world
from syncline.errors import UsageError
from syncline.shares import Pass, Share
from syncline.workload.shard_sources import (
    ByNumber,
    BySampler,
    CutPart,
    Indices,
    Last,
    Order,
    Part,
    Samples,
    TakePart,
    drawn_apart,
    mixed_seed,
    num_batches,
    own_part,
)

_INSTEAD = {
    "batch_size": "Give global_batch, the samples of all ranks together.",
    "drop_last": 'Give last="drop".',
    "generator": "Give seed.",
    "sampler": "Give a DataLoader that has it.",
    "batch_sampler": "Give a DataLoader that has it.",
}
"""Keywords of DataLoader that are decided here, and what to give."""
_KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""What a user's DataLoader says about how to load; which samples, and in what order, is decided here."""


def loader(
    data: Samples | Dataset[Any] | DataLoader[Any],
    global_batch: int | None = None,
    *,
    shuffle: bool | None = None,
    last: Last | None = None,
    seed: int | None = None,
    weigh: bool = True,
    **options: Any,
) -> Loader:
    """`data` divided among ranks: a Dataset with numbered samples, an IterableDataset, or a DataLoader of either.

    `global_batch` is the number of samples of all ranks together in a step; a DataLoader has its own, the batch size.
    `last` says what to do with a last batch that is smaller: "uneven" (the default) uses it as it is, "drop" leaves
    it out, and "pad" fills it with samples from the beginning of the epoch. A Dataset is shuffled unless `shuffle` is
    False; a DataLoader decides for itself. All other keywords are DataLoader's.

    Weights are for losses that are means over samples. For others, such as sums, turn them off: `weigh=False`.
    """
    options["weigh"] = weigh
    if seed is not None and seed < 0:
        raise UsageError(f"seed {seed} is below 0.", action="Give 0 or a positive number.")
    if last not in (None, "uneven", "drop", "pad"):
        raise UsageError(f"unknown value {last!r} for last.", action="Choose uneven, drop or pad.")
    if isinstance(data, DataLoader):
        return _from_data_loader(data, global_batch, shuffle=shuffle, last=last, seed=seed, options=options)
    if global_batch is None:
        raise UsageError("a dataset does not say how large a batch is.", action="Give global_batch.")
    last, seed = last or "uneven", seed or 0
    if isinstance(data, IterableDataset):
        _refuse_shuffle(shuffle, "a stream comes in its own order")
        return Loader(data, None, global_batch, last=last, seed=seed, **options)
    if not isinstance(data, Sized):
        raise UsageError(
            f"{type(data).__name__} has no length.", action="Give it __len__, or use an IterableDataset."
        )
    order = ByNumber(len(data), _checked(global_batch), seed=seed, shuffle=shuffle is not False, last=last)
    return Loader(data, order, global_batch, last=last, seed=seed, **options)


class Loader:
    """This rank's batches, epoch after epoch. Every pass is the next epoch; one that ends after its first batch, as
    `next(iter(loader))` does, does not count. Made by `syncline.loader`."""

    def __init__(
        self,
        dataset: Samples | Dataset[Any],
        order: Order | None,
        global_batch: int | None,
        *,
        last: Last = "uneven",
        seed: int = 0,
        whole_batches: bool = False,
        weigh: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        """Without an order, the dataset is a stream; `whole_batches`: what the dataset gives are batches."""
        for name in options.keys() & _INSTEAD.keys():
            raise UsageError(f"loader does not accept {name}.", action=_INSTEAD[name])
        self.dataset: Any = dataset
        self.global_batch = global_batch
        self.epoch = 0
        """The epoch of the pass under way, or of the next one."""
        self.step = 0
        """How many batches of that epoch were given."""
        self.weight = 1.0
        """Of this rank's part of the batch given last: by what its gradients must be multiplied to make their average
        over ranks the mean over the global batch. `syncline.DataParallel` does so by itself."""
        self.last, self.seed = last, seed
        self._order = order
        self._whole_batches = whole_batches
        self._weigh = weigh
        self._collate = collate_fn
        self._options = options
        self._under_way = False
        self._pass = Pass()
        self._made: tuple[world.Place, DataLoader[Any]] | None = None
        self._requests = _Requests()
        self._generator = torch.Generator()  # or DataLoader would draw from the stream of the dropout masks

    def __len__(self) -> int:
        """Batches of an epoch; the same on every rank."""
        if self._order is not None:
            return len(self._order)
        length = len(self.dataset)
        return length if self.global_batch is None else num_batches(length, self.global_batch, self.last)

    def __iter__(self) -> Iterator[Any]:
        if self._under_way:  # the pass before ended early
            self.epoch, self.step = self.epoch + 1, 0
        self._under_way = True
        self._pass.end()  # a traceback may keep a loop that was interrupted, and so its pass
        own, first, finished = Pass(), self.step, False
        self._pass = own
        try:
            for share, batch in self._from_here():
                own.note(share)
                self.weight = share.weight
                yield batch
            finished = True
        finally:
            own.end()
            if finished:
                self.epoch, self.step, self._under_way = self.epoch + 1, 0, False
            elif self._pass is own and self.step <= first + 1:
                self.step, self._under_way = first, False

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler has it. Not needed: every pass is the next epoch."""
        if epoch != self.epoch or self._under_way:
            self.epoch, self.step, self._under_way = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: batches that it was given count as used."""
        return {"epoch": self.epoch, "step": self.step, "seed": self.seed, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on after the batch that was given last when the state was saved."""
        for name, own in (("seed", self.seed), ("global_batch", self.global_batch)):
            if state[name] != own:
                raise UsageError(
                    f"this loader's {name} is {own}, but the saved position is of one with {state[name]}.",
                    action=f"Make the loader with {name}={state[name]}.",
                )
        self.epoch, self.step, self._under_way = state["epoch"], state["step"], False

    def _from_here(self) -> Iterator[tuple[Share, Any]]:
        """The rest of the epoch. Ranks without a sample get stand-ins while a model is trained, because gradients are
        averaged over all ranks; in evaluation they have nothing to do."""
        place = world.place()
        if self.global_batch is not None and self.global_batch < place.world_size and not self._whole_batches:
            raise UsageError(
                f"global_batch {self.global_batch} is smaller than the {place.world_size} ranks.",
                action="Every rank needs at least one sample of a full batch.",
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        self._generator.manual_seed(mixed_seed(self.seed, self.epoch))  # the same on all ranks, for streams
        stand_ins = torch.is_grad_enabled() and world.is_training()
        if self._order is not None and not self._whole_batches:
            return self._numbered(place, self._order, stand_ins)
        return self._parts(place, stand_ins)

    def _numbered(self, place: world.Place, order: Order, stand_ins: bool) -> Iterator[tuple[Share, Any]]:
        shares: deque[tuple[int, Share]] = deque()

        def requests() -> Iterator[Indices]:
            for step, batch in enumerate(order.batches(self.epoch, self.step), start=self.step):
                part, counted = own_part(batch, *place)
                if counted or stand_ins:
                    shares.append((step + 1, self._share(counted, len(batch), place, stand_ins)))
                    yield Indices.of(part, self.seed, self.epoch, step, place.rank)

        self._requests.upcoming = requests()
        for batch in self._data_loader(place):
            self.step, share = shares.popleft()
            yield share, batch

    def _parts(self, place: world.Place, stand_ins: bool) -> Iterator[tuple[Share, Any]]:
        done = self.step
        if self._order is not None:
            self._requests.upcoming = (number for (number,) in self._order.batches(self.epoch, done))
        made = self._data_loader(place)
        # Worker processes have generators of their own, which the loader's seeds alike on all ranks.
        in_process = self._order is None and not made.num_workers
        parts: Iterator[Part] = drawn_apart(made, mixed_seed(self.seed, self.epoch)) if in_process else iter(made)
        for _ in range(done if self._order is None else 0):  # a stream has no other way to a place in its middle
            next(parts, None)
        for batch, counted, num_global in parts:
            self.step += 1
            if counted or stand_ins:
                yield self._share(counted, num_global, place, stand_ins), batch

    def _share(self, counted: int, num_global: int, place: world.Place, stand_ins: bool) -> Share:
        everywhere = stand_ins or num_global >= place.world_size
        return Share(counted, num_global, place.world_size, everywhere, self._weigh)

    def _data_loader(self, place: world.Place) -> DataLoader[Any]:
        """The same from epoch to epoch, so that persistent workers persist."""
        if self._made is None or self._made[0] != place:
            options = {**self._options, "generator": self._generator}
            collate = self._collate
            if self._whole_batches:
                options |= {"batch_size": None, "collate_fn": CutPart(collate or default_convert, *place)}
                options |= {"sampler": self._requests} if self._order is not None else {}
            elif self._order is None:
                fill_to = self.global_batch if self.last == "pad" else None
                options |= {"batch_size": self.global_batch, "drop_last": self.last == "drop"}
                options["collate_fn"] = TakePart(collate or default_collate, *place, fill_to)
            else:
                options |= {"batch_sampler": self._requests, "collate_fn": collate}
            self._made = (place, DataLoader(self.dataset, **options))
        return self._made[1]


class _Requests:
    """What DataLoader asks its workers for."""

    upcoming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.upcoming


def _checked(global_batch: int) -> int:
    if global_batch < 1:
        raise UsageError(f"global_batch {global_batch} is no batch.", action="Give at least 1.")
    return global_batch


def _refuse_shuffle(shuffle: bool | None, why: str) -> None:
    if shuffle is not None:
        raise UsageError(f"shuffle does not apply: {why}.", action="Leave it out.")


def _from_data_loader(
    data: DataLoader[Any],
    global_batch: int | None,
    *,
    shuffle: bool | None,
    last: Last | None,
    seed: int | None,
    options: dict[str, Any],
) -> Loader:
    """What it loads and how; a batch of it is one global batch, but for one made for a single rank of several."""
    dataset, sampler = data.dataset, data.sampler
    last = last or ("drop" if data.drop_last else "uneven")
    replicas = 1
    if isinstance(sampler, DistributedSampler):
        replicas, shuffle = sampler.num_replicas, sampler.shuffle if shuffle is None else shuffle
        seed = sampler.seed if seed is None else seed
    seed = seed or 0
    given = {name: getattr(data, name) for name in _KEPT if getattr(data, name, None)}
    given |= {"collate_fn": data.collate_fn, **options}
    whole_batches = data.batch_sampler is None
    own_batches = not whole_batches and data.batch_size is None
    if whole_batches or own_batches:
        if global_batch is not None or last != "uneven":
            raise UsageError(
                "this DataLoader makes its batches by a batch sampler of its own, or has no batch size.",
                action="Leave out global_batch and last, or give the dataset itself.",
            )
    else:
        global_batch = _checked(global_batch if global_batch is not None else (data.batch_size or 1) * replicas)
    order = _order_of(data, 1 if whole_batches else global_batch, shuffle=shuffle, last=last, seed=seed)
    return Loader(
        dataset, order, global_batch, last=last, seed=seed, whole_batches=whole_batches, **given
    )  # fmt: skip


def _order_of(
    data: DataLoader[Any], size: int | None, *, shuffle: bool | None, last: Last, seed: int
) -> Order | None:
    sampler = data.sampler
    if isinstance(data.dataset, IterableDataset):
        _refuse_shuffle(shuffle, "a stream comes in its own order")
        return None
    if size is None:
        _refuse_shuffle(shuffle, "the batch sampler decides the order")
        assert data.batch_sampler is not None
        return BySampler(data.batch_sampler, None, seed=seed, last=last)
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if plain or isinstance(sampler, SequentialSampler | DistributedSampler):
        shuffled = plain if shuffle is None else shuffle
        return ByNumber(len(data.dataset), size, seed=seed, shuffle=shuffled, last=last)  # type: ignore[arg-type]
    _refuse_shuffle(shuffle, "the sampler decides the order")
    return BySampler(sampler, size, seed=seed, last=last)
