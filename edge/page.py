"""The status page for people: one HTML document for a phone or a desk, by day and by night. Pure; no scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from edge.overview import overview
from edge.publish.message import utc_text

if TYPE_CHECKING:
    from edge.overview import Row, Table
    from edge.status import Snapshot

__all__ = ["render"]

_REFRESH_S = 5
_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1c2330; --dim: #667085;
  --good: #137a3e; --warning: #9a5b00; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --back: #11151c; --card: #191f29; --line: #2c3542; --text: #e4e8ee; --dim: #98a2b3;
    --good: #4cc38a; --warning: #f0b429; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--back); color: var(--text);
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.25rem; }
h2 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
p, ul { margin: .25rem 0; }
ul { padding-left: 1.2rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .25rem .75rem; }
.verdict { margin: 1rem 0 0; padding: .75rem; border-left: .4rem solid; }
.verdict strong { font-size: 1.15rem; }
.verdict li { color: var(--text); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem .35rem 0; text-align: left; vertical-align: top; }
th { color: var(--dim); font-weight: normal; font-size: .85rem; }
tbody tr { border-top: 1px solid var(--line); }
tbody tr:first-child, tr.note { border-top: 0; }
.note td { padding-top: 0; font-size: .85rem; color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1rem; margin: .35rem 0; }
dt { color: var(--dim); }
dd { margin: 0; }
.good { color: var(--good); }
.warning { color: var(--warning); }
.bad { color: var(--bad); }
.dim { color: var(--dim); }
footer { margin: 1.5rem 0 0; color: var(--dim); font-size: .85rem; }
a { color: inherit; }
@media (max-width: 40rem) {
  thead { display: none; }
  tbody tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .35rem 0; }
  td { padding: 0; }
  tr:not(.note) td:first-child { font-weight: 600; }
  td[data-label]::before { content: attr(data-label) " "; color: var(--dim); font-size: .85rem; }
  tr.note { padding-top: 0; } }
"""


def render(snapshot: Snapshot, *, now_utc_us: int) -> str:
    """The page.

    Args:
        snapshot: the daemon as it is.
        now_utc_us: microseconds since the Unix epoch.
    """
    picture = overview(snapshot)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in picture.reasons)
    facts = "".join(
        f'<dt>{escape(fact.label)}</dt><dd class="{fact.tone}">{escape(fact.text)}</dd>' for fact in picture.facts
    )
    events = "".join(
        f'<dt>{_moment(event.at_utc_us, now_utc_us)}</dt><dd class="{tone}">{escape(event.text)}</dd>'
        for event, tone in reversed(picture.events)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{_REFRESH_S}">
<title>{escape(picture.verdict)}: {escape(snapshot.device)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(picture.title)}</h1>
<p class="dim">{escape(picture.subtitle)}</p>
<section class="verdict {picture.tone}"><strong>{escape(picture.verdict)}</strong>
{f"<ul>{reasons}</ul>" if reasons else ""}</section>
<h2>Streams</h2>
{_table(picture.streams)}
<h2>Models</h2>
{_table(picture.models)}
<h2>Device</h2>
<section><dl>{facts}</dl></section>
<h2>Last events, UTC</h2>
<section>{f"<dl>{events}</dl>" if events else "<p>none yet</p>"}</section>
<footer>{utc_text(now_utc_us)[:19].replace("T", " ")} UTC, latencies since the start, renewed every {_REFRESH_S} s;
for machines: <a href="/status">status</a>, <a href="/metrics">metrics</a>, <a href="/healthz">healthz</a>,
<a href="/readyz">readyz</a></footer>
</body>
</html>
"""


def _moment(at_utc_us: int, now_utc_us: int) -> str:
    """The time of day, with the day if it was another."""
    at, now = utc_text(at_utc_us), utc_text(now_utc_us)
    return at[11:19] if at[:10] == now[:10] else f"{at[:10]} {at[11:19]}"


def _table(table: Table) -> str:
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "".join(_row(table.header, row) for row in table.rows)
    return f"<section><table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></section>"


def _row(header: tuple[str, ...], row: Row) -> str:
    cells = [f"<td>{escape(cell)}</td>" for cell in row.cells[:2]]
    # On a phone the header gives way to a label in each cell.
    cells += [
        f'<td data-label="{escape(name)}">{escape(cell)}</td>'
        for name, cell in zip(header[2:], row.cells[2:], strict=True)
    ]
    note = ""
    if row.note is not None:
        note = f'<tr class="note"><td colspan="{len(header)}">{escape(row.note)}</td></tr>'
    return f'<tr class="{row.tone}">{"".join(cells)}</tr>{note}'
