"""The event logs of a run folder, as far as they are whole: who wrote which, in which session, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from syncline.block_file import read_content, read_lines
from syncline.blocks import Group, Record, Words, bodies_of, body_of, decode, group_records, in_order
from syncline.events.clocks import Alignment, align
from syncline.events.rank_log import RankLog
from syncline.spans import FORMAT

BATCH = 2048
"""Records of an older log that make a block in memory."""

LARGEST, MOST_RANKS = 2**62, 2**20
"""Above them, times cannot be reckoned with, and ranks not counted."""

_SPAN: tuple[tuple[str, type], ...] = (("start", int), ("end", int), ("step", int))
_NEEDED: dict[str, tuple[tuple[str, type], ...]] = {
    "header": (("format", int), ("rank", int), ("world_size", int), ("wall_ns", int), ("monotonic_ns", int)),
    "phase": (("name", str), *_SPAN),
    "step": _SPAN,
    "collective": (("name", str), ("label", str), ("bytes", int), ("ready", int), *_SPAN),
    "pack": (("label", str), ("busy", int), *_SPAN),
    "prediction": (("step", int),),
    "clock": (("offset", int), ("interval", int), ("at", int)),
}


def read_file(path: Path, problems: list[str]) -> list[RankLog]:
    """The sessions in one rank's file."""
    logs: list[RankLog] = []
    lost = {"block": 0, "line": 0}
    try:
        content, lines = read_content(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if content[:1] in (b"{", b""):  # of an earlier version
        content, lines = b"", content + lines
    for body in bodies_of(content):
        groups = None if body is None else decode(body)
        if body is None or groups is None:
            lost["block"] += 1
        elif not all(map(_is_whole_group, groups)) or any("format" in group.columns for group in groups):
            lost["line"] += _take(in_order(groups), logs, path)
        elif logs:
            logs[-1].look(body, groups)
        else:
            lost["block"] += 1
    lost["line"] += _take_lines(lines, logs, path)
    for what, count in lost.items():
        if count:
            said = f"1 {what}" if count == 1 else f"{count} {what}s"
            problems.append(f"{path.name}: skipped {said}, cut short or damaged")
    if not logs:
        problems.append(f"{path.name} is empty")
        return []
    newest = max(log.header["format"] for log in logs)
    if newest > FORMAT:
        problems.append(
            f"{path.name} was written by a newer version (format {newest}, this one reads {FORMAT}): "
            "what it does not know is skipped; update Syncline"
        )
    return logs


def _take_lines(lines: bytes, logs: list[RankLog], path: Path) -> int:
    lost, batch = 0, []
    for record in read_lines(lines):
        batch.append(record)
        if len(batch) == BATCH:
            lost += _take(batch, logs, path)
            batch = []
    return lost + _take(batch, logs, path)


def _take(records: Sequence[Record | None], logs: list[RankLog], path: Path) -> int:
    """Bring records that stand alone, or among headers and damaged ones, into the form of a block. Returns how many
    are lost."""
    lost = 0
    whole: list[Record] = []

    def look() -> None:
        if whole:
            logs[-1].look(body_of(whole), group_records(whole))
            whole.clear()

    for record in records:
        if record is None or not is_whole(record) or (record["kind"] != "header" and not logs):
            lost += 1
        elif record["kind"] == "header":
            look()
            logs.append(RankLog(int(record["rank"]), record))
        else:
            whole.append(record)
    look()
    return lost


def is_whole(record: Record) -> bool:
    """Whether every field that is read later has the type that it needs."""
    if not isinstance(record.get("kind"), str) or not isinstance(record.get("method", ""), str):
        return False
    for name, kind in _NEEDED.get(record["kind"], ()):
        value = record.get(name)
        if type(value) is not kind or (isinstance(value, int) and not -LARGEST < value < LARGEST):
            return False
    return record["kind"] != "header" or (
        0 <= record["rank"] < record["world_size"] <= MOST_RANKS
        and all(record.get(name) is None or type(record[name]) is int for name in ("host", "threads"))
    )


def _is_whole_group(group: Group) -> bool:
    """The same for all records of a group at once."""
    kinds = group.columns.get("kind")
    if not isinstance(kinds, Words) or not all(isinstance(value, str) for value in kinds.values):
        return False
    method = group.columns.get("method")
    if method is not None and not (isinstance(method, Words) and all(isinstance(v, str) for v in method.values)):
        return False
    for name, kind in (need for value in kinds.values for need in _NEEDED.get(value, ())):
        column = group.columns.get(name)
        if isinstance(column, Words):
            if not all(isinstance(value, kind) for value in column.values) or kind is int:
                return False
        elif column is None or kind is not int or column.dtype.kind != "i":
            return False
    return True


def sessions_of(logs: Sequence[RankLog]) -> list[dict[int, RankLog]]:
    """Logs of one session, by rank: in order of wall time, a rank that starts again begins a new session."""
    sessions: list[dict[int, RankLog]] = []
    for log in sorted(logs, key=lambda log: int(log.header["wall_ns"])):
        if not sessions or log.rank in sessions[-1]:
            sessions.append({})
        sessions[-1][log.rank] = log
    return sessions


def settle(number: int, session: dict[int, RankLog], problems: list[str]) -> dict[int, Alignment]:
    """Put every rank's times on the clock of the lowest rank."""
    reference = session[min(session)]
    alignments = {}
    for rank, log in session.items():
        alignment = alignments[rank] = align(log.header, reference.header, list(log.records("clock")))
        if alignment.source == "wall clock":
            problems.append(
                f"rank {rank} and rank {reference.rank} did not compare their clocks: aligned by the time of day, so "
                "do not trust wait and wire between them"
            )
        log.settle(alignment, number)
    return alignments
