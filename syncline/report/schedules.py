"""A schedule drawn: rounds as text for the terminal, and as SVG with one line per rank and one column per round."""

from __future__ import annotations

from html import escape

from syncline.collectives.schedule import Round, Schedule, Transfer

COLUMN, ROW, MARGIN, TOP = 150, 56, 70, 64
COLORS = {"add": "#c2410c", "copy": "#1d4ed8"}
STYLE = """<style>
.schedule { background: #fff; --ink: #111; --soft: #555; --line: #ddd; --add: #c2410c; --copy: #1d4ed8; }
@media (prefers-color-scheme: dark) {
  .schedule { background: #16181c; --ink: #e6e6e3; --soft: #a2a6ad; --line: #3d4148;
    --add: #fb923c; --copy: #7fb2ff; }
}
.schedule text { fill: var(--ink); } .schedule .soft { fill: var(--soft); } .schedule .rank { stroke: var(--line); }
.schedule .add { stroke: var(--add); } .schedule .copy { stroke: var(--copy); }
.schedule .fill.add, .schedule text .add, .schedule text.add { fill: var(--add); stroke: none; }
.schedule .fill.copy, .schedule text .copy, .schedule text.copy { fill: var(--copy); stroke: none; }
</style>"""
"""Light or dark as the reader's screen is. What does not know styles draws the colours of each shape: light."""


def schedule_text(schedule: Schedule) -> str:
    """One line a round: 0>1:c2+ means rank 0 sends chunk 2 to rank 1, which adds it; = means it replaces it."""
    busiest = max(schedule.chunks_sent(rank) for rank in range(schedule.world_size))
    lines = [
        f"{schedule.name} on {schedule.world_size} ranks: {schedule.num_chunks} chunks, {len(schedule.rounds)} "
        f"rounds; the busiest rank sends {busiest / schedule.num_chunks:g} x the buffer",
        "source>target:chunk, + adds, = replaces",
    ]
    for number, transfers in enumerate(schedule.rounds):
        lines.append(f"round {number}: " + "  ".join(_short(transfer) for transfer in transfers))
    return "\n".join(lines)


def _short(transfer: Transfer) -> str:
    return f"{transfer.source}>{transfer.target}:{transfer.chunk}{'+' if transfer.op == 'add' else '='}"


def schedule_svg(schedule: Schedule) -> str:
    width = MARGIN + COLUMN * max(1, len(schedule.rounds)) + 20
    height = TOP + ROW * schedule.world_size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" class="schedule">',
        f"<title>{escape(schedule.name)} all-reduce on {schedule.world_size} ranks</title>",
        STYLE,
        f'<text x="12" y="22" font-size="15">{escape(schedule.name)}, {schedule.world_size} ranks: '
        f'<tspan class="add" fill="{COLORS["add"]}">adds</tspan>, then '
        f'<tspan class="copy" fill="{COLORS["copy"]}">replaces</tspan></text>',
        _markers(),
    ]
    parts += [_rank_line(rank, width) for rank in range(schedule.world_size)]
    for number, transfers in enumerate(schedule.rounds):
        parts += _round(number, transfers)
    return "\n".join([*parts, "</svg>", ""])


def _markers() -> str:
    heads = "".join(
        f'<marker id="{op}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="fill {op}" d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
        for op, color in COLORS.items()
    )
    return f"<defs>{heads}</defs>"


def _rank_line(rank: int, width: int) -> str:
    y = _y(rank)
    return (
        f'<text x="12" y="{y + 4}" fill="#111">rank {rank}</text>'
        f'<line x1="{MARGIN}" y1="{y}" x2="{width - 10}" y2="{y}" class="rank" stroke="#ddd"/>'
    )


def _round(number: int, transfers: Round) -> list[str]:
    """Transfers of one pair are one arrow with all its chunks. Arrows fan out so that they do not hide each other."""
    left = MARGIN + COLUMN * number
    drawn = [f'<text x="{left + 12}" y="46" class="soft" fill="#555">round {number}</text>']
    arrows: dict[tuple[int, int, str], list[int]] = {}
    for transfer in transfers:
        arrows.setdefault((transfer.source, transfer.target, transfer.op), []).append(transfer.chunk)
    for position, ((source, target, op), chunks) in enumerate(arrows.items()):
        x = left + 16 + (COLUMN - 56) * position / max(1, len(arrows) - 1 or 1)
        drawn.append(_arrow(x, source, target, op, chunks))
    return drawn


def _arrow(x: float, source: int, target: int, op: str, chunks: list[int]) -> str:
    y1, y2 = _y(source), _y(target)
    label = f"{chunks[0]}" if len(chunks) == 1 else f"{chunks[0]}–{chunks[-1]}"
    return (
        f'<line x1="{x:.0f}" y1="{y1}" x2="{x + 18:.0f}" y2="{y2}" class="{op}" stroke="{COLORS[op]}" '
        f'marker-end="url(#{op})"/><circle cx="{x:.0f}" cy="{y1}" r="3" class="fill {op}" fill="{COLORS[op]}"/>'
        f'<text x="{x + 5:.0f}" y="{y1 + (14 if y2 > y1 else -6)}" class="{op}" fill="{COLORS[op]}" '
        f'font-size="11">{label}</text>'
    )


def _y(rank: int) -> int:
    return TOP + ROW * rank + ROW // 2
