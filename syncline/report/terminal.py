"""What a terminal shows: tables of rows that were computed elsewhere, and the progress of a run."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from syncline.methods import BASELINE, CONTROL
from syncline.units import format_bytes, format_count, format_rate, format_seconds, format_spread
from syncline.voice import ERASE_LINE, Voice


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", caption: str = "") -> None:
    """The first column left, the others right. Where there is no terminal to fit, nothing is cut."""
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    if caption:
        print(caption)


def print_paragraph(text: str) -> None:
    """Lines that fit the terminal; where there is none, as it is."""
    width = Console().width if sys.stdout.isatty() else None
    print(text if width is None else "\n".join(textwrap.fill(line, width) for line in text.splitlines()))


def comparison_table(rows: Sequence[dict[str, Any]], *, title: str, steps: int, warmup: int, block: int = 1) -> None:
    unit = next((unit for unit in ("tokens", "samples") if rows and f"{unit}_per_s" in rows[0]), "images")
    rate = "img/s" if unit == "images" else f"{unit}/s"
    columns = ["method", "ranks", "step", rate, "speed-up", "time/ddp", "loss"]
    cells = [
        [
            row["label"],
            f"{row['workers']}x{row['threads']}",
            format_spread(row["step"]["median_s"], row["step"]["spread_s"]),
            format_count(row[f"{unit}_per_s"]),
            _ratio(row.get("speedup"), is_baseline=row["label"] == BASELINE),
            _ratio(row.get("ratio_to_ddp"), is_baseline=row["label"] == CONTROL),
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
        ]
        for row in rows
    ]
    turns = "methods taking turns" if block == 1 else f"methods taking turns of {block}"
    caption = (
        f"Median of {steps} steps, {turns}; {warmup} warm-up steps of each are cut.\n"
        "Ranks: workers x threads. ±: half the interquartile range. Speed-up:\n"
        "against single with one worker's threads. time/ddp: round by round, then the median.\n"
        "= : no difference, 1 lies inside the spread of the ratio. Loss: of the last step, same\n"
        "batches for all."
    )
    print_table(columns, cells, title=title, caption=caption)
    for row in rows:
        if row.get("predicted"):
            print(f"{row['label']}: {prediction_text(row['predicted'])}")
        if row.get("left_s", 0.0) > 0.001:
            ratio = _ratio(row.get("ratio_to_ddp_with_left"), is_baseline=row["label"] == CONTROL)
            print(
                f"{row['label']}: {format_seconds(row['left_s'])} of transfers were left after each turn; "
                f"with them, time/ddp is {ratio}."
            )


def prediction_text(predicted: Mapping[str, Any]) -> str:
    """What a method expected of a step, what it took, and what the other way would take."""
    step_s, measured_s = predicted["step_s"], predicted["measured_s"]
    text = f"predicted {format_seconds(step_s)} a step"
    if measured_s is not None:
        text += f", measured {format_seconds(measured_s)} ({measured_s / step_s - 1:+.0%})"
    if predicted["waits"]:
        other = format_seconds(predicted["ahead_s"])
        return f"{text}; it waits at the end of each backward, since going on gains too little ({other})."
    barrier, bound = (format_seconds(predicted[name]) for name in ("barrier_s", "bound_s"))
    return f"{text}; {barrier} if it waited at the end of each backward, at least {bound}."


def _ratio(ratio: dict[str, Any] | None, *, is_baseline: bool) -> str:
    if ratio is None:
        return "-"
    if is_baseline:
        return "1"
    equal = "=" if ratio["no_difference"] else ""
    return f"{equal}{ratio['median']:.2f}±{ratio['spread'] / 2:.2f}"


def certificate_table(rows: Sequence[dict[str, Any]]) -> None:
    columns = ["workers, model, method", "same shards in turn", "one worker, whole batch", "drift"]
    cells = [
        [
            f"{row['workers']}  {row['model']}  {row['method']}",
            describe(row["sequential"]),
            describe(row["one_worker"]),
            f"{row['drift']:.1e}",
        ]
        for row in rows
    ]
    caption = (
        "Gradients from identical weights. In brackets: the largest error as a share of its bound.\n"
        "Drift: largest difference of a weight after free-running steps; shown, not judged."
    )
    if any(row["one_worker"].get("difference") is not None for row in rows):
        caption += "\n16 bits alone: what 16-bit compute changes by itself, as a share of the largest gradient."
    print_table(columns, cells, caption=caption)


def describe(verdict: dict[str, Any]) -> str:
    status = verdict["status"]
    if status == "bitwise":
        return "bitwise equal"
    if status == "order":
        return f"equal up to order ({verdict['ratio']:.2g})"
    if status == "lossy":
        return f"lossy, within its bound ({verdict['ratio']:.2g})"
    if status == "explained":
        size = verdict.get("difference")
        alone = f"; 16 bits alone: {size:.1e}" if size is not None else ""
        return f"differs: {verdict['cause']}; equal without{alone}"
    return f"WRONG at {verdict['where']} ({verdict['ratio']:.2g} x the bound)"


def probe_tables(rows: Sequence[dict[str, Any]], *, workers: int) -> None:
    """For each backend the times by size; then the lines fitted through them."""
    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        sizes = [point["bytes"] for point in own[0]["points"]]
        cells = [
            [format_bytes(size), *(_time(row["points"][number]) for row in own)] for number, size in enumerate(sizes)
        ]
        columns = ["message", *(row["operation"].replace("_", "-") for row in own)]
        print(f"{backend}, {workers} ranks: time of one operation")
        print_table(columns, cells)
    columns = ["fitted", "latency", "95 %", "rate", "95 %", "worst"]
    caption = (
        "Median ± half the interquartile range; every result was checked.\n"
        "Send-receive: one way between the first and the last rank. Fitted: latency +\n"
        "bytes / rate. Worst: how far a median lies from that line."
    )
    print_table(columns, [_fit_cells(row) for row in rows], caption=caption)


def _time(point: dict[str, Any]) -> str:
    if point["median_s"] < 1e-3:
        return f"{point['median_s'] * 1e6:.0f} ±{point['spread_s'] * 5e5:.0f} µs"
    return format_spread(point["median_s"], point["spread_s"])


def _fit_cells(row: dict[str, Any]) -> list[str]:
    fit, name = row["fit"], f"{row['backend']} {row['operation'].replace('_', '-')}"
    if fit is None:
        return [name, *["-"] * 5]
    slow, fast = (1 / beta if beta > 0 else None for beta in reversed(fit["beta_interval_s_per_byte"]))
    return [
        name,
        format_seconds(fit["alpha_s"]),
        " to ".join(format_seconds(alpha) for alpha in fit["alpha_interval_s"]),
        format_rate(fit["bytes_per_s"]) if fit["bytes_per_s"] else "-",
        f"{format_rate(slow) if slow else '-'} to {format_rate(fast) if fast else 'any'}",
        f"{fit['worst_deviation']:.0%}",
    ]


class Display:
    """Lines on stdout, a progress bar on stderr where that is a terminal, as far as the voice allows. On ranks
    other than 0 nothing at all."""

    def __init__(self, voice: Voice, *, rank: int = 0, unit: str = "step", counted: str = "images") -> None:
        self._has_bar = rank == 0 and voice.has_bar
        self._has_lines = rank == 0 and voice.has_lines
        self._unit = unit
        self.counted = counted
        """What a rate is of: images or tokens."""
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._has_bar and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
                transient=True,
                refresh_per_second=4,  # it runs beside what is timed
            )
            self._console.file.write(ERASE_LINE)  # what was said while this rank started
            self._task = self._bar.add_task(self._unit, total=None, figures="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, total: int, loss: float, units_per_s: float) -> None:
        self.progress(step, total, f"loss {loss:.3f} (rank 0)  {format_count(units_per_s)} {self.counted}/s")

    def progress(self, done: int, total: int, figures: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, figures=figures)

    def doing(self, what: str) -> None:
        """Something that is not a step takes its time."""
        if self._bar is not None:
            self._bar.update(self._task, figures=what, refresh=True)

    def line(self, text: str) -> None:
        if not self._has_lines:
            return
        if self._bar is not None and sys.stdout.isatty():
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)
