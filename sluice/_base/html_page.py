"""Self-contained HTML pages: they load nothing from anywhere, and can be read on a phone, on paper and aloud."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { margin-bottom: 0.2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.4rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
.headline { font-size: 1.2rem; font-weight: 600; }
.warning { background: #fdecea; border-left: 5px solid #b3261e; padding: 0.7rem 1rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; width: 11rem; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0; }
td { padding: 0.25rem 0; vertical-align: top; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.wide table { font-variant-numeric: tabular-nums; }
.wide th, .wide td { width: auto; padding: 0.3rem 1rem 0.3rem 0; overflow-wrap: normal; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; }
figure svg { max-width: 100%; height: auto; }
li { margin: 0.25rem 0; }
@media print { body { margin: 0; max-width: none; } section { break-inside: avoid; } .wide { overflow: visible; } }
"""


def document(title: str, body: str, *, style: str = "") -> str:
    """A whole page, with further rules of style where they are given."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}{style}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def named_values(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{cells}</table>"


def wide_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, label: str) -> str:
    """A table with a heading for each column and each row, which is scrolled where it is wider than the screen.

    Args:
        rows: of HTML, so that a cell can hold a link.
        label: what it is a table of, for those who hear it.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    # It can be focused, so that it can be scrolled by keyboard.
    return (
        f'<div class="wide" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bullets(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def figure(svg: str, *, label: str) -> str:
    """A plot inside the page: the SVG element alone, without the XML declaration that has no place in HTML."""
    return f'<figure role="img" aria-label="{escape(label)}">{svg[svg.index("<svg") :].strip()}</figure>'
