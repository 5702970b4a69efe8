"""Figures: as plotly's JSON, which the page draws by itself, and the same numbers as files, drawn by matplotlib for
Markdown and for printing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.study.figures import COMMUNICATION, COMPUTE, Bar, FigureData, Series, Timeline

COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8a8a8a",
    "#b8a800",
    "#6a3d9a",
    "#b15928",
)
"""Okabe and Ito's, which people who see colours differently can tell apart, and a few more."""
PART_COLOURS = {
    "data": "#8a8a8a",
    "copy": "#6a3d9a",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "pack": "#b8a800",
    "wait": "#d55e00",
    "wire": "#e69f00",
    "sync": "#d55e00",
    "transfer": "#e69f00",
    "score": "#cc79a7",
    "update": "#009e73",
    "other": "#bbbbbb",
}


def plot(figure: FigureData) -> dict[str, Any]:
    """Data and layout; the page adds the colours of text and grid, which depend on light or dark, the legend, and
    what the y axis shows, as a line of text above it."""
    factor, unit = unit_of(figure)
    colours, dashes = colours_of(figure), dashes_of(figure)
    traces = [_trace(figure, series, colours[series.name], factor) for series in figure.series]
    for trace, dash in zip(traces, dashes, strict=True):
        if figure.kind != "boxes":
            trace["hovertemplate"] = f"%{{x}}: %{{y:.4g}} {unit}"
        if dash:
            trace["line"] = {**trace["line"], "dash": dash}
    if figure.ideal:
        traces.append(_ideal(figure))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": figure.x_label, "standoff": 12}, **_x_axis(figure)},
        "yaxis": {"rangemode": "tozero"},
        "barmode": "stack" if figure.kind == "stacked" else "group",
        "boxmode": "group",
    }
    return {"data": traces, "layout": layout}


def y_title(figure: FigureData) -> str:
    _, unit = unit_of(figure)
    return f"{figure.y_label} ({unit})" if unit and unit != figure.y_label else figure.y_label


def dashes_of(figure: FigureData) -> list[str]:
    """Of each series: a dash where it lies on top of an earlier line, which shows through; else nothing."""
    patterns, dashes = ("dash", "dot", "dashdot"), []
    largest = max((abs(y) for series in figure.series for y in series.y), default=0.0)
    for number, series in enumerate(figure.series):
        under = [
            other
            for other in figure.series[:number]
            if other.x == series.x
            and all(abs(a - b) <= 0.01 * largest for a, b in zip(other.y, series.y, strict=True))
        ]
        hides = figure.kind == "lines" and not series.fit_of and under
        dashes.append(patterns[(len(under) - 1) % len(patterns)] if hides else "")
    return dashes


def colours_of(figure: FigureData) -> dict[str, str]:
    """One for each series; a law has that of the line it goes through."""
    usual = _colours([series.name for series in figure.series])
    colours: dict[str, str] = {}
    for series in figure.series:
        colours[series.name] = colours.get(series.fit_of, usual[series.name])
    return colours


def _trace(figure: FigureData, series: Series, colour: str, factor: float) -> dict[str, Any]:
    trace: dict[str, Any] = {"name": series.name, "x": series.x, "y": [value * factor for value in series.y]}
    if figure.kind == "boxes":
        pairs = [(x, value * factor) for x, values in zip(series.x, series.samples, strict=True) for value in values]
        trace |= {
            "x": [str(x) for x, _ in pairs],
            "y": [y for _, y in pairs],
            "type": "box",
            "line": {"color": colour},
        }
        return trace
    if series.half_spread is not None:
        trace["error_y"] = {"type": "data", "array": [value * factor for value in series.half_spread]}
    if series.fit_of:
        line = {"color": colour, "dash": "dash", "width": 1}
        return trace | {"type": "scatter", "mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False}
    if figure.kind == "lines":
        return trace | {"type": "scatter", "mode": "lines+markers", "line": {"color": colour}}
    return trace | {"x": [str(x) for x in series.x], "type": "bar", "marker": {"color": colour}}


def _ideal(figure: FigureData) -> dict[str, Any]:
    ends = sorted({x for series in figure.series for x in series.x})
    return {
        "name": "ideal", "x": ends, "y": ends, "type": "scatter", "mode": "lines",
        "line": {"dash": "dot", "color": "#8a8a8a"},
    }  # fmt: skip


def _x_axis(figure: FigureData) -> dict[str, Any]:
    """Where x are a few numbers (1, 2, 4 workers), exactly these are marked."""
    marks = sorted({x for series in figure.series if not series.fit_of for x in series.x if not isinstance(x, str)})
    if figure.kind == "lines" and 0 < len(marks) <= 12:
        return {"tickmode": "array", "tickvals": marks}
    return {} if figure.kind == "lines" else {"type": "category", "showgrid": False}


def unit_of(figure: FigureData) -> tuple[float, str]:
    if figure.unit == "s":
        largest = max((value for series in figure.series for value in series.y), default=0.0)
        return (1.0, "s") if largest >= 10 else (1e3, "ms")
    if figure.unit == "%":
        return 100.0, "%"
    return (1e-9, "GB/s") if figure.unit == "B/s" else (1.0, "" if figure.unit == "x" else figure.unit)


def plot_timeline(timeline: Timeline) -> dict[str, Any]:
    """One lane for each rank's compute and communication; a bar for each span; zoom by dragging."""
    names = list(dict.fromkeys(span.name for span in timeline.spans))
    traces = []
    colours = _colours(names)
    for name in names:
        spans = [span for span in timeline.spans if span.name == name]
        traces.append(
            {
                "name": name, "type": "bar", "orientation": "h", "y": [span.lane for span in spans],
                "base": [round(span.start_ms, 3) for span in spans],
                "x": [round(span.length_ms, 3) for span in spans],
                "hovertext": [span.text for span in spans], "hoverinfo": "text",
                "marker": {"color": colours[name], "opacity": _shades(spans), "line": {"width": 0}},
            }
        )  # fmt: skip
    ends = [span.start_ms + span.length_ms for span in timeline.spans]
    first = min([0.0, *(span.start_ms for span in timeline.spans)])
    labels = [_lane_label(lane) for lane in timeline.lanes]
    layout = {
        "xaxis": {"title": {"text": "ms since the step began", "standoff": 8}, "range": [first, max(ends) * 1.005]},
        "yaxis": {
            "categoryorder": "array", "categoryarray": list(reversed(timeline.lanes)), "showgrid": False,
            "tickmode": "array", "tickvals": timeline.lanes, "ticktext": labels,
        },
        "barmode": "overlay", "bargap": 0.14, "height": 64 + 34 * len(timeline.lanes),
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _shades(spans: Sequence[Bar]) -> list[float]:
    """Of transfers that follow each other in a lane every second one is paler, so that each can be seen."""
    lanes: dict[str, int] = {}
    shades = []
    for span in spans:
        lanes[span.lane] = lanes.get(span.lane, 0) + 1
        shades.append(0.62 if span.name == "transfer" and lanes[span.lane] % 2 == 0 else 1.0)
    return shades


def _lane_label(lane: str) -> str:
    """Short: a phone has room for the bars beside it."""
    return "transfers" if lane.endswith(COMMUNICATION) else lane.removesuffix(f" {COMPUTE}")


def write_figure(figure: FigureData, path: Path) -> None:
    """As SVG and PNG beside each other; `path` has no ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    factor, _ = unit_of(figure)
    canvas, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    _draw(figure, axes, factor)
    axes.set_title(figure.title, loc="left")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(y_title(figure))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if any(series.name for series in figure.series):
        axes.legend(frameon=False, fontsize="small")
    for ending in ("svg", "png"):
        canvas.savefig(path.with_suffix(f".{ending}"), dpi=120)
    pyplot.close(canvas)


def _draw(figure: FigureData, axes: Any, factor: float) -> None:
    colours = colours_of(figure)
    if figure.kind == "lines":
        for series in figure.series:
            look = {"linestyle": "--", "linewidth": 0.8} if series.fit_of else {"marker": "o"}
            label = "" if series.fit_of else series.name
            axes.plot(series.x, [y * factor for y in series.y], label=label, color=colours[series.name], **look)
        if figure.ideal:
            ends = sorted({x for series in figure.series for x in series.x})
            axes.plot(ends, ends, linestyle=":", color="#8a8a8a", label="ideal")
        return
    places = list(dict.fromkeys(str(x) for series in figure.series for x in series.x))
    axes.set_xticks(range(len(places)), places, rotation=20 if max(map(len, places)) > 8 else 0)
    width = 0.8 if figure.kind == "stacked" else 0.8 / len(figure.series)
    base = [0.0] * len(places)
    for number, series in enumerate(figure.series):
        offset = 0.0 if figure.kind == "stacked" else (number - (len(figure.series) - 1) / 2) * width
        at = [places.index(str(x)) for x in series.x]
        colour = colours[series.name]
        if figure.kind == "boxes":
            samples = [[value * factor for value in values] for values in series.samples]
            boxes = axes.boxplot(samples, positions=[p + offset for p in at], widths=width * 0.8, manage_ticks=False)
            for box in boxes["boxes"]:
                box.set_color(colour)
            axes.plot([], [], color=colour, label=series.name)
            continue
        heights = [y * factor for y in series.y]
        error = [value * factor for value in series.half_spread] if series.half_spread else None
        stacked = figure.kind == "stacked"
        axes.bar(
            [p + offset for p in at], heights, width, bottom=[base[p] for p in at] if stacked else 0,
            yerr=None if stacked else error, label=series.name, color=colour, capsize=2,
        )  # fmt: skip
        for place, height in zip(at, heights, strict=True):
            base[place] += height


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A part of a step has its own; other names take turns with those that no part in the same drawing has."""
    taken = {PART_COLOURS[name] for name in names if name in PART_COLOURS}
    free = itertools.cycle([colour for colour in COLOURS if colour not in taken] or COLOURS)
    return {name: PART_COLOURS.get(name) or next(free) for name in names}
