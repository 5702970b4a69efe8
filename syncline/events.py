"""What the event logs of a run say, as typed data: by method, step and rank, all on rank 0's clock.

A log may be cut short, empty, of a crashed or resumed run, or of a newer version. `problems` says what is wrong; what
can be read is there. A run that was resumed has several sessions; of a step that was repeated, the last one counts.

Ranks on one host read the same monotonic clock. Between hosts, ranks ping rank 0 (`comm/clock.py`) at the start and
at the end of a run; between those moments a clock is assumed to drift evenly. Times are nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from syncline.errors import RunFolderError
from syncline.methods import current_label
from syncline.spans import FORMAT, Record, read_records

if TYPE_CHECKING:
    import polars

TIMES = ("ready", "start", "end")
COLUMNS = {
    "rank": int, "host": int, "session": int, "seq": int, "step": int, "method": str, "kind": str, "name": str,
    "label": str, "start_ns": int, "end_ns": int, "ready_ns": int, "busy_ns": int, "seconds": float, "bytes": int,
    "value": float, "samples": int,
}  # fmt: skip
"""Of the table: who, when in the run, what, and its figures. See docs/definitions.md."""
SPANS = ("step", "phase", "collective", "pack")


@dataclass(frozen=True)
class Phase:
    """data, copy, forward, backward, sync or update: what the step says it does."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Transfer:
    """One operation between ranks. `ready` is when this rank had what it sends."""

    name: str
    label: str
    num_bytes: int
    ready: int
    start: int
    end: int


@dataclass(frozen=True)
class Pack:
    """Copying or dividing gradients on the computing thread: `busy` nanoseconds between start and end."""

    label: str
    start: int
    end: int
    busy: int


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step, in order of time."""

    rank: int
    start: int
    end: int
    phases: tuple[Phase, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    packs: tuple[Pack, ...] = ()
    carried: tuple[Transfer, ...] = ()
    """Transfers of the step before, which were still on their way when this one began."""
    stalls: tuple[Phase, ...] = ()
    """Where forward stood still for one of them, by its label."""

    @property
    def duration(self) -> int:
        return self.end - self.start

    def phase(self, name: str) -> Phase | None:
        """The last phase of that name: a user's step may have several backwards."""
        return next((phase for phase in reversed(self.phases) if phase.name == name), None)


@dataclass(frozen=True)
class Step:
    """One step on the ranks that took it to its end."""

    number: int
    session: int
    ranks: dict[int, RankStep]


@dataclass(frozen=True)
class RankInfo:
    """What the header of a rank's log says; the last one where there are several."""

    rank: int
    host: int = 0
    threads: int | None = None
    about: Record = field(default_factory=dict)
    """The whole header."""


@dataclass(frozen=True)
class Events:
    """The logs of a run. `steps` has the steps of each method, in order; a training run has one method."""

    world_size: int
    ranks: dict[int, RankInfo]
    steps: dict[str, list[Step]]
    alignments: dict[int, Alignment]
    """How each rank's clock was set to rank 0's, in the last session."""
    records: dict[int, list[Record]]
    """Every record of every rank as it was written, but on rank 0's clock and with its session; headers left out."""
    problems: list[str]

    def taking_part(self, method: str) -> list[int]:
        """The ranks that take steps with a method: rank 0 alone for `single` in a comparison."""
        return sorted({rank for step in self.steps.get(method, []) for rank in step.ranks})

    def complete(self, method: str) -> list[Step]:
        """The steps that every rank which takes part has finished."""
        ranks = self.taking_part(method)
        return [step for step in self.steps.get(method, []) if sorted(step.ranks) == ranks]

    def of_kind(self, kind: str) -> Iterator[tuple[int, Record]]:
        """(rank, record) of one kind."""
        for rank, records in sorted(self.records.items()):
            yield from ((rank, record) for record in records if record["kind"] == kind)

    def table(self) -> polars.DataFrame:
        """One row for each span and loss; a record of several figures (memory, counter, calibration) has one row for
        each, with the figure's name."""
        import polars

        rows = [
            {"rank": rank, "host": self.ranks[rank].host, **row}
            for rank, records in sorted(self.records.items())
            for record in records
            for row in _table_rows(record)
        ]
        types = {int: polars.Int64, float: polars.Float64, str: polars.String}
        return polars.DataFrame(rows, schema={name: types[kind] for name, kind in COLUMNS.items()}, strict=False)


NO_EVENTS = Events(0, {}, {}, {}, {}, [])
"""Of a run whose ranks never wrote a log."""


def _table_rows(record: Record) -> Iterator[dict[str, Any]]:
    about = {name: record.get(name) for name in ("session", "seq", "step", "kind")}
    about["method"] = current_label(record.get("method", ""))
    if record["kind"] in SPANS:
        yield {
            **about, **{name: record.get(name) for name in ("name", "label", "bytes")},
            **{f"{name}_ns": record.get(name) for name in (*TIMES, "busy")},
            "seconds": (record["end"] - record["start"]) / 1e9, "value": record.get("learning_rate"),
        }  # fmt: skip
    elif record["kind"] == "loss":
        yield {**about, "value": record.get("value"), "samples": record.get("samples")}
    else:
        figures = {name: value for name, value in record.items() if name not in about and _is_number(value)}
        for name, value in figures.items() or ((record.get("name"), None),):
            yield {**about, "name": name, "value": value}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def read_events(run: Path) -> Events:
    """The logs in a run folder. Raises only where there is nothing at all to read."""
    paths = sorted((run / "events").glob("rank-*.jsonl"))
    if not paths:
        raise RunFolderError(f"{run} has no event log.", action="It ended before any rank had started; run it again.")
    problems: list[str] = []
    files = [parts for path in paths if (parts := _read_file(path, problems)) is not None]
    if not files:
        raise RunFolderError(f"the event logs of {run} are empty: {'; '.join(problems)}.", action="Run it again.")
    sessions = _sessions([part for file in files for part in file])
    alignments: dict[int, Alignment] = {}
    for session in sessions:
        alignments |= _align(session, problems)
    infos = {part.rank: _info(part.header) for session in sessions for part in session.values()}
    world_size = max(int(part.header.get("world_size", 1)) for part in sessions[-1].values())
    if missing := sorted(set(range(world_size)) - set(infos)):
        problems.append(f"no log of rank {', '.join(map(str, missing))}")
    records: dict[int, list[Record]] = defaultdict(list)
    for number, session in enumerate(sessions):
        for rank, part in session.items():
            records[rank] += [{**record, "session": number} for record in part.records]
    steps = _steps(sessions, problems)
    return Events(world_size, infos, steps, alignments, dict(records), problems)


@dataclass(frozen=True)
class _Part:
    """A header and the records after it: one session of one rank."""

    rank: int
    header: Record
    records: list[Record]


def _read_file(path: Path, problems: list[str]) -> list[_Part] | None:
    parts: list[_Part] = []
    damaged = 0
    for record in read_records(path):
        if record is None or not _is_whole(record):
            damaged += 1
        elif record["kind"] == "header":
            parts.append(_Part(int(record.get("rank", _rank_of(path))), record, []))
        elif parts:
            parts[-1].records.append(record)
        else:
            damaged += 1
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        problems.append(f"{path.name}: skipped {lines}, cut short or damaged")
    if not parts:
        problems.append(f"{path.name} is empty")
        return None
    newest = max(part.header.get("format", 0) for part in parts)
    if newest > FORMAT:
        problems.append(
            f"{path.name} was written by a newer version (format {newest}, this one reads {FORMAT}): "
            "what it does not know is skipped; update Syncline"
        )
    return parts


def _is_whole(record: Record) -> bool:
    """Whether every field that is read later has the type that it needs."""
    needed = _NEEDED.get(record["kind"], ())
    return all(isinstance(record.get(name), kind) for name, kind in needed)


_SPAN: tuple[tuple[str, type], ...] = (("start", int), ("end", int), ("step", int))
_NEEDED: dict[str, tuple[tuple[str, type], ...]] = {
    "header": (("format", int), ("rank", int), ("world_size", int), ("wall_ns", int), ("monotonic_ns", int)),
    "phase": (("name", str), *_SPAN),
    "step": _SPAN,
    "collective": (("name", str), ("label", str), ("bytes", int), ("ready", int), *_SPAN),
    "pack": (("label", str), ("busy", int), *_SPAN),
    "clock": (("offset", int), ("interval", int), ("at", int)),
}


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank-")
    return int(digits) if digits.isdigit() else 0


def _sessions(parts: Sequence[_Part]) -> list[dict[int, _Part]]:
    """Parts that ran together, by rank: in order of wall time, a rank that starts again begins a new session."""
    sessions: list[dict[int, _Part]] = []
    for part in sorted(parts, key=lambda part: int(part.header["wall_ns"])):
        if not sessions or part.rank in sessions[-1]:
            sessions.append({})
        sessions[-1][part.rank] = part
    return sessions


def _align(session: dict[int, _Part], problems: list[str]) -> dict[int, Alignment]:
    """Put every rank's times on the clock of the lowest rank, in place."""
    reference = session[min(session)]
    alignments = {}
    for rank, part in session.items():
        exchanges = [record for record in part.records if record["kind"] == "clock"]
        alignment = alignments[rank] = align(part.header, reference.header, exchanges)
        if alignment.source == "wall clock":
            problems.append(
                f"rank {rank} and rank {reference.rank} did not compare their clocks: aligned by the time of day, so "
                "do not trust wait and wire between them"
            )
        if not alignment.is_same:
            for record in part.records:
                for name in TIMES:
                    if isinstance(record.get(name), int):
                        record[name] = alignment.apply(record[name])
    return alignments


def _info(header: Record) -> RankInfo:
    return RankInfo(int(header["rank"]), int(header.get("host") or 0), header.get("threads"), header)


def _steps(sessions: Sequence[dict[int, _Part]], problems: list[str]) -> dict[str, list[Step]]:
    by_method: dict[str, dict[int, Step]] = defaultdict(dict)
    for number, session in enumerate(sessions):
        gathered: dict[tuple[str, int], dict[int, RankStep]] = defaultdict(dict)
        for rank, part in session.items():
            for (method, step), rank_step in _rank_steps(rank, part.records).items():
                gathered[method, step][rank] = rank_step
            _say_where_it_ended(rank, part.records, problems, last=number == len(sessions) - 1)
        for (method, step), ranks in gathered.items():
            by_method[method][step] = Step(step, number, dict(sorted(ranks.items())))
    return {method: [steps[step] for step in sorted(steps)] for method, steps in by_method.items()}


def _rank_steps(rank: int, records: Sequence[Record]) -> dict[tuple[str, int], RankStep]:
    """A record belongs to a step if it lies inside: the meeting before it or the loss line after it does not."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    inside: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] == "step":
            spans[_key(record)] = (record["start"], record["end"])
        elif record["kind"] in ("phase", "collective", "pack"):
            inside[_key(record)].append(record)
    for (method, number), (start, _) in spans.items():  # started only when the next step had begun
        late = [record for record in inside[method, number] if record["kind"] == "collective"]
        inside[method, number - 1] += [record for record in late if record["ready"] < start]
    steps = {}
    for key, (start, end) in spans.items():
        own = [record for record in inside[key] if _lies_inside(record, start, end)]
        if any(record["kind"] == "phase" for record in own):  # else the rank had no part in it
            steps[key] = _rank_step(rank, start, end, sorted(own, key=lambda record: int(record["start"])))
    for (method, number), own_step in list(steps.items()):
        before = steps.get((method, number - 1))
        carried = tuple(transfer for transfer in before.transfers if transfer.end > own_step.start) if before else ()
        if carried:
            steps[method, number] = replace(own_step, carried=carried)
    return steps


def _lies_inside(record: Record, start: int, end: int) -> bool:
    """A transfer lies where what it sends was ready: with method ahead it may go on into the next step."""
    if record["kind"] == "collective":
        return start <= int(record["ready"]) <= end
    return start <= int(record["start"]) and int(record["end"]) <= end


def _rank_step(rank: int, start: int, end: int, records: Sequence[Record]) -> RankStep:
    phases, transfers, packs, stalls = [], [], [], []
    for record in records:
        if record["kind"] == "phase" and record["name"] == "stall":
            stalls.append(Phase(record["label"], record["start"], record["end"]))
        elif record["kind"] == "phase":
            phases.append(Phase(record["name"], record["start"], record["end"]))
        elif record["kind"] == "collective":
            ready = min(max(record["ready"], start), record["end"])
            about = (record["name"], record["label"], record["bytes"])
            transfers.append(Transfer(*about, ready, record["start"], record["end"]))
        else:
            packs.append(Pack(record["label"], record["start"], record["end"], record["busy"]))
    return RankStep(rank, start, end, tuple(phases), tuple(transfers), tuple(packs), stalls=tuple(stalls))


def _key(record: Record) -> tuple[str, int]:
    return current_label(record.get("method", "")), int(record["step"])


def _say_where_it_ended(rank: int, records: Sequence[Record], problems: list[str], *, last: bool) -> None:
    """A step that has phases but no end is where a crash or a stop was."""
    ended = {_key(record) for record in records if record["kind"] == "step"}
    inside = [record for record in records if record["kind"] == "phase" and record["step"] >= 0]
    cut = [record for record in inside if _key(record) not in ended]
    if cut and last:
        problems.append(f"rank {rank}'s log ends in step {cut[-1]['step']}, after {cut[-1]['name']}")


# Clocks.


@dataclass(frozen=True)
class Alignment:
    """Add `offset_ns` (at `at_ns`, growing by `drift` per nanosecond) to a rank's time to have rank 0's."""

    source: Literal["same clock", "ping", "wall clock"]
    offset_ns: int = 0
    at_ns: int = 0
    drift: float = 0.0
    interval_ns: int = 0
    """The true offset lies this far or less from the one that is used: half the shortest round trip."""

    @property
    def is_same(self) -> bool:
        return self.source == "same clock"

    def apply(self, time_ns: int) -> int:
        return time_ns + self.offset_ns + round((time_ns - self.at_ns) * self.drift)


def align(header: Record, reference: Record, exchanges: Sequence[Record]) -> Alignment:
    """From the headers of a rank and of the reference rank, and the rank's clock records."""
    if header is reference or header.get("clock") == reference.get("clock"):
        return Alignment("same clock")
    if not exchanges:
        offset = _since_epoch(header) - _since_epoch(reference)
        return Alignment("wall clock", offset, header["monotonic_ns"])
    first, last = exchanges[0], exchanges[-1]
    passed = last["at"] - first["at"]
    drift = (last["offset"] - first["offset"]) / passed if passed > 0 else 0.0
    return Alignment("ping", first["offset"], first["at"], drift, max(first["interval"], last["interval"]))


def _since_epoch(header: Record) -> int:
    """What the monotonic clock must be given to tell the time of day."""
    return int(header["wall_ns"]) - int(header["monotonic_ns"])
