"""Values: what a table or figure of a study may show of a row, by name, with its label, unit and definition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.accounting.breakdown import COMMUNICATION, COMPUTE, PARTS, overlap
from syncline.accounting.statistics import paired_ratio
from syncline.measure.fits import Law, SerialFit, fit_law
from syncline.methods import CONTROL
from syncline.study.rows import Quantity, Row, baseline_of, side_by_side, speedup_over
from syncline.units import format_bytes, format_seconds, format_spread

UNTIMED = (
    "loss", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "gradients", "gflops", "bytes_per_gflop",
    "memory", "bytes_per_sample", "needed_bytes", "room_share",
)  # fmt: skip
"""Values that do not depend on how long anything took."""


@dataclass(frozen=True)
class Value:
    label: str
    unit: str
    """s, B, B/s, % (a share of one), x (a ratio), or a word for a count."""
    read: Callable[[Row, Sequence[Row]], Quantity | None]
    definition: str
    """One sentence with the formula."""

    def text(self, quantity: Quantity | None) -> str:
        return "-" if quantity is None else format_quantity(quantity, self.unit)


def format_quantity(quantity: Quantity, unit: str) -> str:
    value, spread = quantity.value, quantity.spread
    if unit == "s":
        text = format_spread(value, spread) if spread is not None else format_seconds(value)
        return text if quantity.share is None else f"{text} ({quantity.share:.0%})"
    if unit == "s/epoch":
        return f"{value:.1f} s"
    if unit == "B":
        return format_bytes(round(value))
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "%":
        return f"{value:.1%} ±{spread / 2:.1%}" if spread else f"{value:.1%}"
    whole = 1e4 <= value < 1e12 and value == int(value)  # a count: 20480, not 2.048e+04
    digits = f"{value:.2f}" if unit == "x" else f"{value:.0f}" if whole else f"{value:.4g}"
    return f"{digits} ±{spread / 2:.2g}" if spread else digits


def _step(row: Row, _: Sequence[Row]) -> Quantity | None:
    return row.step()


def _mean_step(row: Row, _: Sequence[Row]) -> Quantity | None:
    return Quantity(statistics.fmean(row.seconds)) if row.seconds else None


def batch_of(row: Row) -> float:
    """Samples of a step: where there are fewer than the plan asks for, all of them."""
    batch = float(row.point["global_batch"])
    return min(batch, row.figures.get("train_samples") or batch)


def _throughput(row: Row, _: Sequence[Row]) -> Quantity | None:
    step = row.step()
    return None if step is None else Quantity(batch_of(row) / step.value)


def _parts_step(row: Row, _: Sequence[Row]) -> Quantity | None:
    whole = row.mean_step_s()
    return None if whole is None else Quantity(whole)


def _mean(row: Row) -> float | None:
    """What a step takes on average: as the parts add up to, where they are known."""
    if not row.seconds:
        return None
    return row.mean_step_s() or statistics.fmean(row.seconds)


def _epoch(row: Row, _: Sequence[Row]) -> Quantity | None:
    """Time of one pass over the training set at this batch: a sum of steps, so it takes the mean."""
    step, samples = _mean(row), row.figures.get("train_samples")
    if step is None or not samples:
        return None
    return Quantity(step * -(-samples // row.point["global_batch"]))


def _usual_epoch(row: Row, _: Sequence[Row]) -> Quantity | None:
    """Time of one pass at the median step: what stands beside a speed-up, which compares medians."""
    step, steps = row.step(), _steps_of_epoch(row)
    return Quantity(step.value * steps) if step is not None and steps else None


def _epoch_without_data(row: Row, rows: Sequence[Row]) -> Quantity | None:
    whole, step = _epoch(row, rows), _mean(row)
    if whole is None or not step or "data" not in row.parts:
        return None
    return Quantity(whole.value * max(0.0, 1 - row.parts["data"] / step))


def _over_one_worker(row: Row, rows: Sequence[Row]) -> Quantity | None:
    """What a step costs more than one worker's on the same share: communication and all else that workers share."""
    if row.workers == 1 or "batch_per_worker" not in row.point:
        return None
    base, step = baseline_of(row, rows), _mean(row)
    alone = _mean(base) if base is not None else None
    return None if step is None or alone is None else Quantity(step - alone)


def _steps_of_epoch(row: Row) -> int | None:
    samples = row.figures.get("train_samples")
    return -(-samples // row.point["global_batch"]) if samples else None


def _epoch_compute(row: Row, rows: Sequence[Row]) -> Quantity | None:
    """One worker's epoch, shared by n: its step on the same share x the steps of an epoch on n workers."""
    base, steps = baseline_of(row, rows), _steps_of_epoch(row)
    alone = _mean(base) if base is not None else None
    return Quantity(alone * steps) if alone is not None and steps else None


def _epoch_communication(row: Row, rows: Sequence[Row]) -> Quantity | None:
    over, steps = _over_one_worker(row, rows), _steps_of_epoch(row)
    return Quantity(over.value * steps) if over is not None and steps else None


def _speedup(row: Row, rows: Sequence[Row]) -> Quantity | None:
    """Throughput against one worker's: T(1)/T(n) at one global batch, throughput(n)/throughput(1) otherwise."""
    base = baseline_of(row, rows)
    return Quantity(speedup_over(base, row)) if base is not None and base.seconds and row.seconds else None


def _efficiency(row: Row, rows: Sequence[Row]) -> Quantity | None:
    base, speedup = baseline_of(row, rows), _speedup(row, rows)
    return None if base is None or speedup is None else Quantity(speedup.value * base.workers / row.workers)


def _time_to_ddp(row: Row, rows: Sequence[Row]) -> Quantity | None:
    """Round by round where both were measured side by side."""
    controls = [
        control
        for control in rows
        if (control.method, control.stage) == (CONTROL, row.stage) and _place(control) == _place(row)
    ]
    beside = [control for control in controls if control.seconds and side_by_side(control, row)]
    if not beside:
        return None
    ratio = paired_ratio(row.seconds, beside[0].seconds)
    return Quantity(ratio.median, ratio.spread)


def _place(row: Row) -> dict[str, str]:
    return {key: str(value) for key, value in row.point.items() if key != "method"}


def _figure(name: str) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, _: Sequence[Row]) -> Quantity | None:
        value = row.figures.get(name)
        return None if value is None else Quantity(float(value))

    return read


def figure_value(name: str, label: str, unit: str, definition: str) -> Value:
    """Of a figure that a lab's own experiment puts into its rows."""
    return Value(label, unit, _figure(name), definition)


def _last_epoch(name: str) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, _: Sequence[Row]) -> Quantity | None:
        epochs: list[dict[str, Any]] = row.figures.get("epochs") or []
        value = epochs[-1].get(name) if epochs else None
        return None if value is None else Quantity(float(value))

    return read


def _part(*names: str) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, _: Sequence[Row]) -> Quantity | None:
        if not row.parts:
            return None
        part, whole = sum(row.parts.get(name, 0.0) for name in names), row.mean_step_s()
        return Quantity(part, share=part / whole if whole and set(names) <= set(PARTS) else None)

    return read


def _share(*names: str) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, _: Sequence[Row]) -> Quantity | None:
        whole = row.mean_step_s()
        return Quantity(sum(row.parts.get(name, 0.0) for name in names) / whole) if whole else None

    return read


def _overlap(row: Row, _: Sequence[Row]) -> Quantity | None:
    share = overlap(row.parts["hidden"], row.parts.get("wire", 0.0)) if "hidden" in row.parts else None
    return None if share is None else Quantity(share)


def _gradient_bandwidth(row: Row, _: Sequence[Row]) -> Quantity | None:
    size, wire = row.figures.get("gradient_bytes"), row.parts.get("wire", 0.0) + row.parts.get("hidden", 0.0)
    return Quantity(size / wire) if size and wire else None


def _bus_bandwidth(row: Row, rows: Sequence[Row]) -> Quantity | None:
    algorithm = _gradient_bandwidth(row, rows)
    return None if algorithm is None else Quantity(algorithm.value * 2 * (row.workers - 1) / row.workers)


def _gflops(row: Row, _: Sequence[Row]) -> Quantity | None:
    flops = row.figures.get("flops_per_sample")
    return Quantity(flops * row.point["global_batch"] / row.workers / 1e9) if flops else None


def _bytes_per_gflop(row: Row, rows: Sequence[Row]) -> Quantity | None:
    work, size = _gflops(row, rows), row.figures.get("gradient_bytes")
    return Quantity(size / work.value) if work is not None and size else None


def _asked_rate(row: Row, rows: Sequence[Row]) -> Quantity | None:
    size, spent = row.figures.get("gradient_bytes"), _part(*COMPUTE)(row, rows)
    return Quantity(size / spent.value) if size and spent is not None and spent.value else None


def fit_rows(law: Law, row: Row, rows: Sequence[Row]) -> SerialFit | None:
    """The law fitted to the curve that a row is on: speed-up by nodes (by workers if the study has no nodes) over all
    rows of its stage, model and method."""
    speedups: dict[int, float] = {}
    model = row.point.get("model")
    for other in rows:
        if (other.stage, other.method, other.point.get("model")) == (row.stage, row.method, model):
            base = baseline_of(other, rows)
            if base is not None and base.seconds and other.seconds:
                speedups[other.workers // base.workers] = speedup_over(base, other)
    return fit_law(law, speedups)


def _serial_share(law: Law) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, rows: Sequence[Row]) -> Quantity | None:
        fit = fit_rows(law, row, rows)
        if fit is None:
            return None
        return Quantity(fit.share, fit.interval[1] - fit.interval[0] if fit.interval else None)

    return read


def _deviation(law: Law) -> Callable[[Row, Sequence[Row]], Quantity | None]:
    def read(row: Row, rows: Sequence[Row]) -> Quantity | None:
        fit = fit_rows(law, row, rows)
        return None if fit is None else Quantity(fit.worst_deviation)

    return read


def _amdahl_limit(row: Row, rows: Sequence[Row]) -> Quantity | None:
    fit = fit_rows("amdahl", row, rows)
    return None if fit is None or fit.limit is None else Quantity(fit.limit)


def _utilisation(row: Row, rows: Sequence[Row]) -> Quantity | None:
    bus, link = _bus_bandwidth(row, rows), row.figures.get("link_bytes_per_s")
    return Quantity(bus.value / link) if bus is not None and link else None


def _of_probe(row: Row, rows: Sequence[Row]) -> Quantity | None:
    own, alone = _gradient_bandwidth(row, rows), row.figures.get("probe_bytes_per_s")
    return Quantity(own.value / alone) if own is not None and alone else None


VALUES: dict[str, Value] = {
    "step": Value(
        "step", "s", _step, "Median wall time of a step on the slowest rank; ± half the interquartile range."
    ),
    "mean_step": Value("average step", "s", _mean_step, "Mean wall time of the timed steps on the slowest rank."),
    "parts_step": Value(
        "step (mean)", "s", _parts_step,
        "Mean over ranks and timed steps, outliers aside: the parts, with their shares of it, add up to it.",
    ),
    "throughput": Value("samples/s", "samples/s", _throughput, "Global batch / median step time."),
    "epoch": Value("epoch", "s", _epoch, "Mean step time x steps of one pass over the training set."),
    "epoch_seconds": Value(
        "time", "s/epoch", _usual_epoch,
        "Median step time x steps of one pass over the training set: as speed-ups have it.",
    ),
    "epoch_compute": Value(
        "compute", "s/epoch", _epoch_compute,
        "One worker's mean step at the same batch per worker x steps of an epoch on n workers.",
    ),
    "epoch_communication": Value(
        "communication", "s/epoch", _epoch_communication,
        "(Mean step - one worker's at the same batch per worker) x steps of an epoch on n workers.",
    ),
    "epoch_without_data": Value(
        "epoch without data", "s", _epoch_without_data, "Epoch x (1 - mean wait for a batch / mean step)."
    ),
    "over_one_worker": Value(
        "over one worker", "s", _over_one_worker,
        "Mean step - one worker's mean step at the same batch per worker: what the others cost, named or not.",
    ),
    "speedup": Value(
        "speed-up", "x", _speedup,
        "Throughput(n) / throughput(1): strong scaling at one global batch, weak at one batch per worker.",
    ),
    "efficiency": Value(
        "efficiency", "%", _efficiency, "Speed-up / workers; / nodes where a study says how many workers a node has."
    ),
    "time_to_ddp": Value("time/ddp", "x", _time_to_ddp, "Median over rounds of step time / ddp's in the same round."),
    "loss": Value("loss", "", _figure("loss"), "Mean loss over the global batch of the last step."),
    "train_loss": Value("training loss", "", _last_epoch("train_loss"), "Sum of losses / samples, last epoch."),
    "train_accuracy": Value("training accuracy", "%", _last_epoch("train_accuracy"), "Right / samples, last epoch."),
    "test_loss": Value("test loss", "", _last_epoch("test_loss"), "Sum of losses / samples of the whole test set."),
    "test_accuracy": Value("test accuracy", "%", _last_epoch("test_accuracy"), "Right / samples, whole test set."),
    **{
        name: Value(name, "s", _part(name), f"The {name} part of the mean step; its share in brackets.")
        for name in PARTS
    },
    "compute": Value("compute", "s", _part(*COMPUTE), "Forward, backward and update, of the mean step."),
    "communication": Value("communication", "s", _part(*COMMUNICATION), "Pack, wait and wire, of the mean step."),
    "compute_share": Value("compute", "%", _share(*COMPUTE), "Compute / step."),
    "communication_share": Value("communication", "%", _share(*COMMUNICATION), "Exposed communication / step."),
    "hidden": Value("hidden", "s", _part("hidden"), "Communication behind backward: beside the step, not inside it."),
    "overlap": Value("overlap", "%", _overlap, "Hidden / (hidden + exposed wire)."),
    "bandwidth": Value(
        "algorithm bandwidth", "B/s", _gradient_bandwidth, "Gradient bytes / time of transfer, hidden or not."
    ),
    "bus_bandwidth": Value("bus bandwidth", "B/s", _bus_bandwidth, "Algorithm bandwidth x 2(n-1)/n."),
    "gradients": Value("gradients", "B", _figure("gradient_bytes"), "Bytes that a worker shares in each step."),
    "gflops": Value(
        "GFLOP", "", _gflops, "Operations of one worker's step: forward and backward of its share, by shapes alone."
    ),
    "bytes_per_gflop": Value(
        "gradients per GFLOP", "B", _bytes_per_gflop, "Bytes of gradients / 10^9 operations of one worker's step."
    ),
    "asked_rate": Value(
        "gradients per compute second", "B/s", _asked_rate, "Bytes of gradients / compute time of a worker's step."
    ),
    "amdahl_share": Value(
        "serial share (Amdahl)", "%", _serial_share("amdahl"),
        "s in T(n) = T(1) (s + (1 - s)/n), by least squares over n at one global batch; ± half of the 95 % interval.",
    ),
    "amdahl_limit": Value("most speed-up (Amdahl)", "x", _amdahl_limit, "1 / s: what ever more nodes could give."),
    "amdahl_deviation": Value(
        "off Amdahl by", "%", _deviation("amdahl"),
        "Largest distance of a measured speed-up from the law; above 10 % the law does not describe the measurement.",
    ),
    "gustafson_share": Value(
        "serial share (Gustafson)", "%", _serial_share("gustafson"),
        "s in speed-up(n) = n - s (n - 1), least squares over n at one batch per node; ± half of the 95 % interval.",
    ),
    "gustafson_deviation": Value(
        "off Gustafson by", "%", _deviation("gustafson"),
        "Largest distance of a measured speed-up from the law; above 10 % the law does not describe the measurement.",
    ),
    "utilisation": Value(
        "of the link", "%", _utilisation,
        "Bus bandwidth / link rate, the one that sends and receives of the probe reached in this study.",
    ),
    "of_probe": Value(
        "of an all-reduce alone", "%", _of_probe,
        "Algorithm bandwidth / that of the probed all-reduce nearest in size, with no compute beside it.",
    ),
    "latency": Value("latency", "s", _figure("latency"), "The constant of the fit time = latency + bytes / rate."),
    "link_rate": Value("rate", "B/s", _figure("link_rate"), "The rate of the fit time = latency + bytes / rate."),
    "memory": Value("peak memory", "B", _figure("peak_bytes"), "Largest resident size of a rank."),
    "bytes_per_sample": Value(
        "bytes per sample", "B", _figure("bytes_per_sample"), "Slope of the peak resident bytes over the batch size."
    ),
    "needed_bytes": Value("one worker needs", "B", _figure("needed_bytes"), "Process + batch x bytes per sample."),
    "room_share": Value(
        "of free memory", "%", _figure("room_share"),
        "Bytes needed / the memory that a study may take: 80 % of what is free.",
    ),
}  # fmt: skip
