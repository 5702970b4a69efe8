"""What the event logs of a run say, as typed data: by method, step and rank, all on rank 0's clock.

A log may be cut short, empty, of a crashed or resumed run, or of a newer version. `problems` says what is wrong; what
can be read is there. A run that was resumed has several sessions; of a step that was repeated, the last one counts.
Times are nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.blocks import Record
from syncline.errors import RunFolderError
from syncline.events.clocks import Alignment
from syncline.events.rank_log import SPANS, TIMES, RankLog
from syncline.events.reading import read_file, sessions_of, settle
from syncline.events.steps import NO_STEPS, Pack, Phase, RankStep, Step, Steps, Transfer, joined
from syncline.methods import current_label
from syncline.spans import log_files

if TYPE_CHECKING:
    import polars

__all__ = [
    "NO_EVENTS", "NO_STEPS", "Alignment", "Events", "Pack", "Phase", "RankInfo", "RankStep", "Step", "Steps",
    "Transfer", "read_events",
]  # fmt: skip

COLUMNS = {
    "rank": int, "host": int, "session": int, "seq": int, "step": int, "method": str, "kind": str, "name": str,
    "label": str, "start_ns": int, "end_ns": int, "ready_ns": int, "busy_ns": int, "seconds": float, "bytes": int,
    "value": float, "samples": int,
}  # fmt: skip
"""Of the table: who, when in the run, what, and its figures. See docs/definitions.md."""
ROWS_AT_ONCE = 50_000
"""Of the table, as it is made: a row takes far more memory as a dict than in the table."""


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
    steps: dict[str, Steps]
    alignments: dict[int, Alignment]
    """How each rank's clock was set to rank 0's, in the last session."""
    logs: Mapping[int, Sequence[RankLog]]
    """Of every rank, session by session."""
    problems: list[str]

    def taking_part(self, method: str) -> list[int]:
        """The ranks that take steps with a method: rank 0 alone for `single` in a comparison."""
        return self.steps.get(method, NO_STEPS).ranks

    def complete(self, method: str) -> Steps:
        """The steps that every rank which takes part has finished."""
        return self.steps.get(method, NO_STEPS).complete()

    def of_kind(self, kind: str | None = None) -> Iterator[tuple[int, Record]]:
        """(rank, record) of one kind, or of all, as it was written but on rank 0's clock and with its session."""
        for rank, logs in sorted(self.logs.items()):
            yield from ((rank, record) for log in logs for record in log.records(kind))

    def table(self, kind: str | None = None) -> polars.DataFrame:
        """One row for each span and loss; a record of several figures (memory, counter, calibration) has one row for
        each, with the figure's name. Of all records, or of one kind."""
        import polars

        types = {int: polars.Int64, float: polars.Float64, str: polars.String}
        schema = {name: types[kind] for name, kind in COLUMNS.items()}
        rows = (
            {"rank": rank, "host": self.ranks[rank].host, **row}
            for rank, record in self.of_kind(kind)
            for row in _table_rows(record)
        )
        frames = [polars.DataFrame(schema=schema)]
        while some := list(islice(rows, ROWS_AT_ONCE)):
            frames.append(polars.DataFrame(some, schema=schema, strict=False))
        return polars.concat(frames)


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
    paths = log_files(run / "events")
    if not paths:
        raise RunFolderError(f"{run} has no event log.", action="It ended before any rank had started; run it again.")
    problems: list[str] = []
    logs = [log for path in paths for log in read_file(path, problems)]
    if not logs:
        raise RunFolderError(f"the event logs of {run} are empty: {'; '.join(problems)}.", action="Run it again.")
    sessions = sessions_of(logs)
    alignments: dict[int, Alignment] = {}
    by_rank: dict[int, list[RankLog]] = defaultdict(list)
    for number, session in enumerate(sessions):
        alignments |= settle(number, session, problems)
        for rank, log in session.items():
            by_rank[rank].append(log)
    infos = {log.rank: _info(log.header) for session in sessions for log in session.values()}
    world_size = max(int(log.header.get("world_size", 1)) for log in sessions[-1].values())
    if missing := sorted(set(range(world_size)) - set(infos)):
        problems.append(f"no log of rank {', '.join(map(str, missing))}")
    problems += [
        f"rank {rank}'s log ends in step {log.ends_in[0]}, after {log.ends_in[1]}"
        for rank, log in sessions[-1].items()
        if log.ends_in is not None
    ]
    return Events(world_size, infos, _steps(sessions), alignments, dict(by_rank), problems)


def _info(header: Record) -> RankInfo:
    return RankInfo(int(header["rank"]), int(header.get("host") or 0), header.get("threads"), header)


def _steps(sessions: Sequence[Mapping[int, RankLog]]) -> dict[str, Steps]:
    def steps_of(method: str) -> Steps:
        def make(number: int, session: int, ranks: Sequence[int]) -> Step:
            logs = sessions[session]
            return Step(number, session, {rank: logs[rank].rank_step(method, number) for rank in ranks})

        parts = [
            (number, {rank: log.taken[method] for rank, log in session.items() if method in log.taken})
            for number, session in enumerate(sessions)
        ]
        return joined(parts, make)

    methods = dict.fromkeys(method for session in sessions for log in session.values() for method in log.taken)
    return {method: steps_of(method) for method in methods}
