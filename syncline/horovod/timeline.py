"""Horovod's timeline: what became of each named tensor, as a Chrome trace. Rank 0 writes it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class Timeline:
    """Off until it is started. The file can be read at any time: Chrome takes an array that does not end yet."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._mark_cycles = False
        self._lanes: dict[str, int] = {}
        self._start_ns = 0
        self._lock = threading.Lock()

    def start(self, path: str | Path, mark_cycles: bool = False) -> None:
        self.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = Path(path).open("w")  # noqa: SIM115 - it stays open until stop
        since_epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        file.write("[\n" + json.dumps({"name": "start", "ph": "M", "pid": 0, "args": since_epoch}))
        with self._lock:
            self._mark_cycles, self._lanes, self._start_ns = mark_cycles, {}, time.monotonic_ns()
            self._file = file

    def note(self, request: dict[str, Any], submitted_ns: int, start_ns: int) -> None:
        """A request that has just been carried out: how long ranks waited for each other, and how long it took."""
        with self._lock:
            if self._file is None:
                return
            kind, end_ns = request["kind"].upper(), time.monotonic_ns()
            name = f"{request['kind']}.{request['name']}"
            events = self._row(name)
            lane = self._lanes[name]
            events.append(self._event(f"NEGOTIATE_{kind}", lane, submitted_ns, start_ns))
            events.append(self._event(kind, lane, start_ns, end_ns))
            if self._mark_cycles:
                events.append(self._event("CYCLE_START", 0, start_ns, start_ns))
            self._write("".join(f",\n{json.dumps(event)}" for event in events))

    def stop(self) -> None:
        """The end of the file."""
        with self._lock:
            self._write("\n]\n")
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, text: str) -> None:
        """A full disk must not end the training."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            print(f"syncline: the timeline ends here: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):  # what is still to be written
                self._file.close()
            self._file = None

    def _row(self, name: str) -> list[dict[str, Any]]:
        """A row of its own for each tensor, as Horovod has it: what says so, if the row is new."""
        if name in self._lanes:
            return []
        self._lanes[name] = len(self._lanes) + 1
        return [{"name": "process_name", "ph": "M", "pid": self._lanes[name], "args": {"name": name}}]

    def _event(self, name: str, lane: int, start_ns: int, end_ns: int) -> dict[str, Any]:
        start_us, length_us = (start_ns - self._start_ns) / 1000, (end_ns - start_ns) / 1000
        return {"name": name, "ph": "X", "ts": start_us, "dur": length_us, "pid": lane, "tid": 0}
