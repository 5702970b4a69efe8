"""Figures as files: the same numbers as the page's, drawn by matplotlib for Markdown and for printing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.report.plots import COLOURS, PART_COLOURS, colours_of, unit_of
from syncline.study.figures import FigureData


def write_figure(figure: FigureData, path: Path) -> None:
    """As SVG and PNG beside each other; `path` has no ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    factor, unit = unit_of(figure)
    canvas, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    _draw(figure, axes, factor)
    axes.set_title(figure.title, loc="left")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(f"{figure.y_label} ({unit})" if unit else figure.y_label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if any(one.name for one in figure.series):
        axes.legend(frameon=False, fontsize="small")
    for ending in ("svg", "png"):
        canvas.savefig(path.with_suffix(f".{ending}"), dpi=120)
    pyplot.close(canvas)


def _draw(figure: FigureData, axes: Any, factor: float) -> None:
    if figure.kind == "lines":
        colours = colours_of(figure)
        for one in figure.series:
            look = {"linestyle": "--", "linewidth": 0.8} if one.fit_of else {"marker": "o"}
            label = "" if one.fit_of else one.name
            axes.plot(one.x, [y * factor for y in one.y], label=label, color=colours[one.name], **look)
        if figure.ideal:
            ends = sorted({x for one in figure.series for x in one.x})
            axes.plot(ends, ends, linestyle=":", color="#8a8a8a", label="ideal")
        return
    places = list(dict.fromkeys(str(x) for one in figure.series for x in one.x))
    axes.set_xticks(range(len(places)), places, rotation=20 if max(map(len, places)) > 8 else 0)
    width = 0.8 if figure.kind == "stacked" else 0.8 / len(figure.series)
    base = [0.0] * len(places)
    for number, one in enumerate(figure.series):
        offset = 0.0 if figure.kind == "stacked" else (number - (len(figure.series) - 1) / 2) * width
        at = [places.index(str(x)) for x in one.x]
        colour = _colour(one.name, number)
        if figure.kind == "boxes":
            samples = [[value * factor for value in values] for values in one.samples]
            boxes = axes.boxplot(samples, positions=[p + offset for p in at], widths=width * 0.8, manage_ticks=False)
            for box in boxes["boxes"]:
                box.set_color(colour)
            axes.plot([], [], color=colour, label=one.name)
            continue
        heights = [y * factor for y in one.y]
        error = [value * factor for value in one.half_spread] if one.half_spread else None
        stacked = figure.kind == "stacked"
        axes.bar(
            [p + offset for p in at], heights, width, bottom=[base[p] for p in at] if stacked else 0,
            yerr=None if stacked else error, label=one.name, color=colour, capsize=2,
        )  # fmt: skip
        for place, height in zip(at, heights, strict=True):
            base[place] += height


def _colour(name: str, number: int) -> str:
    return PART_COLOURS.get(name) or COLOURS[number % len(COLOURS)]
