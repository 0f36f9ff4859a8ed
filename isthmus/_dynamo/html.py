"""An explanation as one HTML page that needs nothing else: a picture of each graph's clusters, tables, texts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from isthmus._dynamo.explanation import (
    PROGRAM_TITLES,
    Cluster,
    Explanation,
    Graph,
    Outside,
    break_rows,
    fallback_rows,
    program_rows,
    refusal_rows,
)
from isthmus._dynamo.text_tables import amount, counted

_WIDTH, _LINE, _GAP = 680, 18, 22
_SHOWN = 8
"""How many ops the histogram of a program shows."""
_LETTER = 7.3
"""The width of a letter in the pictures."""

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2330; --dim: #667085; --line: #d5dae3;
  --box: #eef3fd; --edge: #4d7fd6; --bar: #a9c3f2; --out: #fdf0e3; --fell: #c96a12; }
@media (prefers-color-scheme: dark) { :root { --back: #14171d; --text: #e3e7ee; --dim: #98a2b3; --line: #343a46;
  --box: #1c2638; --edge: #6d9bea; --bar: #33508a; --out: #32261a; --fell: #e59a4f; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
td, th { padding: 0.25rem 0.8rem 0.25rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
.numbers td:not(:first-child), .numbers th { text-align: right; white-space: nowrap; }
pre { overflow: auto; max-height: 40rem; border: 1px solid var(--line); padding: 0.7rem; font-size: 0.8rem; }
summary { cursor: pointer; } svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px ui-monospace, monospace; } svg .dim { fill: var(--dim); }
svg .title { font-weight: bold; }
svg .program { fill: var(--box); stroke: var(--edge); } svg .bar { fill: var(--bar); }
svg .alone { fill: none; stroke: var(--line); stroke-dasharray: 4 3; }
svg .fell { fill: var(--out); stroke: var(--fell); } svg .arrow { stroke: var(--dim); fill: none; }
"""


def page(explanation: Explanation) -> str:
    """Return the page."""
    name = escape(explanation.function)
    parts = [
        f"<h1>{name}</h1><p>{escape(explanation.summary())}<br>{escape(explanation.times())}</p>",
        *_tables(explanation),
        *(_graph(graph) for graph in explanation.graphs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>isthmus: {name}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _tables(explanation: Explanation) -> Iterator[str]:
    tables: list[tuple[str, Sequence[str], list[list[str]], str]] = [
        ("Programs", PROGRAM_TITLES, program_rows(explanation), "numbers"),
        (
            "Nodes that fell back",
            ["graph", "op", "times", "why", "line", "source"],
            fallback_rows(explanation),
            "",
        ),
        ("Graph breaks", ["line", "source", "why"], break_rows(explanation), ""),
        ("Compiled for each size", ["program", "what cannot be padded"], refusal_rows(explanation), ""),
        ("Ran on the CPU", ["op", "times"], [[op, f"{n:,}"] for op, n in explanation.on_cpu.items()], ""),
    ]
    for title, heads, rows, style in tables:
        if rows:
            yield f"<h2>{title}</h2>{_table(heads, rows, style)}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], style: str) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table class="{style}"><tr>{head}</tr>\n{body}</table></div>'


def _graph(graph: Graph) -> str:
    texts = [("FX graph", graph.text())]
    for cluster in graph.clusters:
        for made in cluster.compiled:
            texts.append((f"Graph of {made.name}", str(made.graph)))
            texts += [(f"StableHLO of {made.name}", made.stablehlo()), (f"HLO of {made.name}", made.hlo())]
    folded = "".join(_details(title, text) for title, text in texts)
    return f"<h2>{escape(graph.name)}</h2>{_picture(graph)}{folded}"


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>\n"


def _picture(graph: Graph) -> str:
    """Return the clusters as boxes from top to bottom, with what runs between them."""
    drawn: list[str] = []
    top = 1
    for step in _grouped(graph.steps):
        if drawn:
            drawn.append(_arrow(top))
            top += _GAP
        lines, height = _program(step, top) if isinstance(step, Cluster) else _outside(step, top)
        drawn += lines
        top += height
    size = f'width="{_WIDTH}" height="{top + 1}" viewBox="0 0 {_WIDTH} {top + 1}"'
    return f'<svg {size} role="img" aria-label="{escape(graph.name)}">{"".join(drawn)}</svg>'


def _grouped(steps: Iterable[Cluster | Outside]) -> Iterator[Cluster | list[Outside]]:
    """Yield programs, and the neighbours between them that are outside for one reason, or for none."""
    for key, run in itertools.groupby(steps, lambda s: id(s) if isinstance(s, Cluster) else s.reason):
        if isinstance(key, int):
            yield from (step for step in run if isinstance(step, Cluster))
        else:
            yield [step for step in run if isinstance(step, Outside)]


def _program(cluster: Cluster, top: int) -> tuple[list[str], int]:
    shown = list(cluster.ops.items())[:_SHOWN]
    more = len(cluster.ops) - len(shown)
    height = _LINE * (1 + len(shown) + (more > 0)) + 14
    costs = [f"{amount(made.flops, 'FLOP')}, {amount(made.bytes, 'B')}" for made in cluster.compiled]
    note = costs[0] if len(costs) == 1 else f"{len(costs)} executables" if costs else "not run"
    lines = [
        _box("program", 1, top, _WIDTH - 2, height),
        _text(
            14, top + _LINE, f"{cluster.name}: {counted(cluster.nodes, 'node')}, {note}", _WIDTH - 28, "title"
        ),
    ]
    longest = max(cluster.ops.values(), default=1)
    for number, (op, times) in enumerate(shown):
        y = top + _LINE * (number + 2)
        lines.append(_text(14, y, op, 330))
        lines.append(
            f'<rect class="bar" x="350" y="{y - 11}" width="{max(2, 250 * times // longest)}" height="13"/>'
        )
        lines.append(_text(358 + max(2, 250 * times // longest), y, f"{times:,}", 60))
    if more > 0:
        lines.append(_text(14, top + _LINE * (len(shown) + 2), f"and {counted(more, 'op')} more", 300, "dim"))
    return lines, height


def _outside(nodes: Sequence[Outside], top: int) -> tuple[list[str], int]:
    """Draw nodes outside the programs that share a reason, or have none: those are too few for a program."""
    reason = nodes[0].reason
    ops = Counter(node.op for node in nodes)
    names = ", ".join(op if times == 1 else f"{op} x{times}" for op, times in ops.items())
    why = reason if reason is not None else "one by one between the programs"
    inset, height = 40, 2 * _LINE + 12
    full = f"<title>{escape(names)}\n{escape(why)}</title>"
    width = _WIDTH - 2 * inset
    return [
        f"<g>{full}",
        _box("fell" if reason is not None else "alone", inset, top, width, height),
        _text(inset + 12, top + _LINE, names, width - 24),
        _text(inset + 12, top + 2 * _LINE, why, width - 24, "dim"),
        "</g>",
    ], height


def _box(style: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'


def _text(x: int, y: int, text: str, width: int, style: str = "") -> str:
    """Return a line of text, cut where it would leave its width."""
    room = int(width / _LETTER)
    line = " ".join(text.split())
    line = line if len(line) <= room else line[: room - 1] + "…"
    return f'<text class="{style}" x="{x}" y="{y}">{escape(line)}</text>'


def _arrow(top: int) -> str:
    middle, tip = _WIDTH // 2, top + _GAP - 2
    return f'<path class="arrow" d="M{middle} {top + 2}V{tip}m-4 -5l4 5l4 -5"/>'
