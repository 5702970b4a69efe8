"""The all-reduce patterns: pure functions from world size to Schedule.

With n ranks and S bytes, what the busiest rank sends, and in how many rounds one after the other:

    root               (n-1) S            2
    tree               3 S                about 2 log2 n
    ring               2 (n-1)/n S        2 (n-1)          Patarasuk and Yuan, 2009
    halving-doubling   2 (n-1)/n S        2 log2 n         Thakur et al., 2005; up to S more beyond a power of two
    direct             2 (n-1)/n S        2
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import permutations

from syncline.collectives.schedule import Op, Round, Schedule, Transfer


def root(world_size: int) -> Schedule:
    """Everyone sends all to rank 0, which sends the sum back to everyone."""
    others = range(1, world_size)
    rounds: list[Round] = [
        tuple(Transfer(rank, 0, 0, "add") for rank in others),
        tuple(Transfer(0, rank, 0, "copy") for rank in others),
    ]
    return _schedule("root", world_size, 1, rounds)


def direct(world_size: int) -> Schedule:
    """Rank r sums chunk r: everyone sends it that chunk, and it sends the sum back. All links carry at once."""
    pairs = list(permutations(range(world_size), 2))
    rounds: list[Round] = [
        tuple(Transfer(source, owner, owner, "add") for source, owner in pairs),
        tuple(Transfer(owner, target, owner, "copy") for owner, target in pairs),
    ]
    return _schedule("direct", world_size, world_size, rounds)


def ring(world_size: int) -> Schedule:
    """Each rank talks to its neighbour only: n-1 rounds that add, then n-1 rounds that hand the sums on."""
    rounds: list[Round] = []
    for step in range(world_size - 1):
        rounds.append(_ring_round(world_size, -step, "add"))
    for step in range(world_size - 1):
        rounds.append(_ring_round(world_size, 1 - step, "copy"))
    return _schedule("ring", world_size, world_size, rounds)


def _ring_round(world_size: int, offset: int, op: Op) -> Round:
    ranks = range(world_size)
    return tuple(Transfer(rank, (rank + 1) % world_size, (rank + offset) % world_size, op) for rank in ranks)


def tree(world_size: int) -> Schedule:
    """A binary tree: rank r's children are 2r+1 and 2r+2. Sums climb level by level and come down the same way."""
    up: list[Round] = []
    for level in range(1, world_size.bit_length()):
        ranks = range(2**level - 1, min(2 ** (level + 1) - 1, world_size))
        up.insert(0, tuple(Transfer(rank, (rank - 1) // 2, 0, "add") for rank in ranks))
    down = [tuple(Transfer(t.target, t.source, 0, "copy") for t in transfers) for transfers in reversed(up)]
    return _schedule("tree", world_size, 1, up + down)


def halving_doubling(world_size: int) -> Schedule:
    """Pairs swap halves, then quarters …, until each holds one summed chunk; then the way back.

    Ranks beyond a power of two first add what they have to a partner, and get the result at the end.
    """
    core = 1 << (world_size.bit_length() - 1)
    extra = [(rank, rank - core, chunk) for rank in range(core, world_size) for chunk in range(core)]
    fold = tuple(Transfer(rank, partner, chunk, "add") for rank, partner, chunk in extra)
    unfold = tuple(Transfer(partner, rank, chunk, "copy") for rank, partner, chunk in extra)
    distances = [core >> shift for shift in range(1, core.bit_length())]
    halving: list[Round] = [
        tuple(Transfer(rank, rank ^ distance, chunk, "add") for rank, chunk in _halves(core, distance, keeps=False))
        for distance in distances
    ]
    doubling: list[Round] = [
        tuple(Transfer(rank, rank ^ distance, chunk, "copy") for rank, chunk in _halves(core, distance, keeps=True))
        for distance in reversed(distances)
    ]
    return _schedule("halving-doubling", world_size, core, [fold, *halving, *doubling, unfold])


def _halves(core: int, distance: int, *, keeps: bool) -> list[tuple[int, int]]:
    """(rank, chunk): the half of its 2 x distance chunks that each rank keeps, or gives away, at this distance.

    A rank's chunks at this stage are those that agree with its number above the distance bit.
    """
    return [
        (rank, chunk)
        for rank in range(core)
        for chunk in range(core)
        if (rank ^ chunk) // (2 * distance) == 0 and ((rank ^ chunk) & distance == 0) == keeps
    ]


def _schedule(name: str, world_size: int, num_chunks: int, rounds: list[Round]) -> Schedule:
    """Rounds in which nothing moves are left out: one rank alone has none."""
    return Schedule(name, world_size, num_chunks, tuple(transfers for transfers in rounds if transfers))


PATTERNS: dict[str, Callable[[int], Schedule]] = {
    "root": root,
    "tree": tree,
    "ring": ring,
    "halving-doubling": halving_doubling,
    "direct": direct,
}


@lru_cache
def make_schedule(pattern: str, world_size: int) -> Schedule:
    return PATTERNS[pattern](world_size)
