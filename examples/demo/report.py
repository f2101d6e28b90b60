# ruff: noqa: E501 - the page is prose
"""The demo's page with events and figures. One self-contained file without scripts or external resources."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Protocol

from figures import EventMark, RunHistory, figures
from kills import Kill

DATA = """<p>Data: <a href="https://doi.org/10.24432/C5BW33">Online Retail</a> by Daqing Chen, UCI Machine Learning Repository,
<a href="https://creativecommons.org/licenses/by/4.0/">CC BY 4.0</a>, reduced to stock codes per invoice.</p>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Everything the page shows."""

    summary: dict[str, object]
    """out/demo.json."""
    store: str
    encoding: str
    policy: str
    item_count: int
    tables: dict[str, tuple[int, int]]
    history: RunHistory
    kills: list[Kill]
    took_s: float


def marks_of(happened: list[Kill]) -> list[EventMark]:
    return [
        EventMark(text=f"kill {_short(kill)}", at_s=kill.at_s, last_step=kill.last_step) for kill in happened
    ]


def render(demo_report: DemoReport) -> str:
    return _page(demo_report, figures(demo_report.history))


def _short(kill: Kill) -> str:
    return {"trainer": "trainer", "sidecar mid-upload": "sidecar"}.get(kill.what, "both + wipe")


# Page

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1d2733; font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 44px 24px 64px; }
h1 { font-size: 34px; line-height: 1.18; margin: 0 0 10px; letter-spacing: -.01em; }
h2 { font-size: 20px; margin: 0 0 4px; }
p { margin: 0 0 12px; } p.lead { font-size: 18px; color: #3c4956; max-width: 760px; }
section { background: #fff; border: 1px solid #e2e7ec; border-radius: 10px; padding: 20px 24px 14px; margin: 18px 0; }
section p { color: #4c5965; max-width: 800px; }
svg { width: 100%; height: auto; display: block; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 26px 0 8px; }
.tile { background: #fff; border: 1px solid #e2e7ec; border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 27px; line-height: 1.2; letter-spacing: -.01em; }
.tile span { color: #66737f; font-size: 13.5px; line-height: 1.35; display: block; margin-top: 3px; }
.kills { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 14px; margin: 18px 0; }
.kill { background: #fff; border: 1px solid #e2e7ec; border-top: 4px solid #c22f2f; border-radius: 10px; padding: 16px 18px; }
.kill { display: grid; grid-row: span 4; grid-template-rows: subgrid; row-gap: 0; }
.kill h3 { margin: 0 0 2px; font-size: 17px; line-height: 1.3; } .kill .from { color: #4c5965; margin: 0 0 10px; font-size: 14.5px; }
dl { display: grid; grid-template-columns: 1fr auto; gap: 3px 12px; margin: 0; font-size: 14.5px; }
dt { color: #66737f; } dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.verdict { margin-top: 12px; padding: 7px 10px; border-radius: 6px; font-size: 14px; }
.good { background: #e6f4ea; color: #1c6137; } .bad { background: #fbe9e9; color: #a02222; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 18px; }
.pair section { margin: 0; } footer { color: #66737f; font-size: 14px; margin-top: 26px; } footer p { max-width: 860px; }
code { font: 13.5px ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: #eef1f4; padding: 1px 5px; border-radius: 4px; }
a { color: #2563a8; }
@media (max-width: 520px) { main { padding: 24px 12px; } .pair { grid-template-columns: 1fr; } h1 { font-size: 27px; } }
"""


def _page(demo_report: DemoReport, figures: dict[str, str]) -> str:
    summary = demo_report.summary
    quality, stall = summary["quality"], summary["stall_ms"]
    assert isinstance(quality, dict)
    assert isinstance(stall, dict)
    lost = sum(kill.lost_steps for kill in demo_report.kills)
    exact = all(kill.exact for kill in demo_report.kills)
    headline = (
        f"Killed {count(len(demo_report.kills))} times, {lost} of {summary['steps']:,} steps done twice, nothing lost"
        if exact
        else "Something did not come back as it was saved"
    )
    tiles = [
        (
            f"{len(demo_report.history.seen)}",
            f"checkpoints in {summary['steps']:,} steps, every one committed whole",
        ),
        (f"{summary['reduction']:.1f} &times;", "fewer bytes than the same checkpoints written in full"),
        (
            f"{stall['p50']:.0f} ms",
            f"training stood still per checkpoint (median; longest {stall['max']:.0f} ms)",
        ),
        (
            f"{quality['with_kills']:.4f}",
            f"AUC on held-out baskets; {quality['uninterrupted']:.4f} when nothing is saved or killed",
        ),
    ]
    rows = sum(rows for rows, _ in demo_report.tables.values())
    columns = max(columns for _, columns in demo_report.tables.values())
    body = f"""
<h1>{headline}</h1>
<p class="lead">A recommendation model learns from {demo_report.item_count:,} articles in real shopping baskets which one belongs
into a basket: {rows:,} embedding rows of {columns} numbers, {summary["steps"]:,} steps. While it trains, its processes are
killed with <code>SIGKILL</code>, and a small supervisor restarts them, as Kubernetes would. Nobody tells the training script.</p>
{render_tiles(tiles)}
{cards([_kill_card(kill) for kill in demo_report.kills])}
<section><h2>The run, second by second</h2>
<p>A line falls back where a process died and its successor took over from the newest committed checkpoint; the steps in
between are trained once more. The sidecar's death leaves no trace in the line: the trainer goes on, and the next checkpoint
covers the one that was lost.</p>{figures["progress"]}</section>
<section><h2>Loss across the kills</h2>
<p>In grey the same training without checkpoints and without kills. After each restart the model sees the very same batches,
in the same order, with the same random draws; what remains between the curves is the rounding of rows that came back
from {html.escape(_encoding_name(demo_report.encoding))}.</p>{figures["loss"]}</section>
<section><h2>Bytes per checkpoint</h2>
<p>A full checkpoint of this state is {demo_report.history.full_bytes / 1e6:.0f} MB. Here rows are stored in
{html.escape(_encoding_name(demo_report.encoding))}, their optimizer state and everything else exactly, and most checkpoints hold only the
rows that changed since the last baseline (policy: {html.escape(demo_report.policy)}).</p>{figures["bytes"]}</section>
<div class="pair">
<section><h2>How long training stood still</h2><p>Changed rows are copied into shared memory; encoding and upload happen beside
the training.</p>{figures["stall"]}</section>
<section><h2>How much could be lost</h2><p>Age of the newest committed checkpoint, measured at the store. Dotted: the
kills.</p>{figures["age"]}</section></div>
<footer>
<p><b>How &ldquo;exact&rdquo; is measured.</b> When a checkpoint is cut, and again right after a restore, the training script writes its live
tensors to plain files, past deltashard. Optimizer state and dense parameters must have the same bits; every table row must
be, bit for bit, what the encoding makes of the row that was cut; and every step after a restart must see the batch that the
uninterrupted run saw. &ldquo;Last committed&rdquo; is read from the log in the store, not asked of the processes. After the sidecar's
death the next checkpoint is read back from the store alone, by a third process.</p>
<p>Store: {html.escape(demo_report.store)}. The whole demo took {demo_report.took_s:.0f} s. Numbers: <code>out/demo.json</code>. Again:
<code>make demo</code>, or <code>make demo STORE=minio</code> with a real MinIO server.</p>
{DATA}
</footer>"""
    return document("deltashard demo", body)


def document(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_CSS}</style></head><body><main>{body}</main></body></html>
"""


def render_tiles(tiles: list[tuple[str, str]]) -> str:
    return f"""<div class="tiles">{"".join(f'<div class="tile"><b>{b}</b><span>{s}</span></div>' for b, s in tiles)}</div>"""


def cards(found: list[str]) -> str:
    return f'<div class="kills">{"".join(found)}</div>'


def card(title: str, came_back: str, facts: list[tuple[str, str]], *, exact: bool, verdict: str) -> str:
    items = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    said = f'<div class="verdict {"good" if exact else "bad"}">{html.escape(verdict)}</div>'
    return f'<div class="kill"><h3>{html.escape(title)}</h3><p class="from">{came_back}</p><dl>{items}</dl>{said}</div>'


class ReportedEvent(Protocol):
    """A kill, or another event."""

    @property
    def last_step(self) -> int: ...
    @property
    def restored_step(self) -> int: ...
    @property
    def lost_steps(self) -> int: ...
    @property
    def restore_s(self) -> float: ...
    @property
    def back_s(self) -> float: ...


def facts_of(
    event: ReportedEvent, *, committed: int, restored: str, seconds: str, back: str
) -> list[tuple[str, str]]:
    """Return the numbers of a card; `restored`, `seconds` and `back` are labels of three of them."""
    return [
        ("last step trained", f"{event.last_step:,}"),
        ("last committed step", f"{committed:,}"),
        (restored, f"{event.restored_step:,}"),
        ("steps lost", f"{event.lost_steps:,}"),
        (seconds, f"{event.restore_s:.2f} s"),
        (back, span(event.back_s)),
    ]


def _kill_card(kill: Kill) -> str:
    survived = kill.what.startswith("sidecar")
    came_back = (
        "Training did not notice. The next checkpoint, read back from the store, holds everything."
        if survived
        else f"Training came back from {html.escape(_source_name(kill.source))}"
    )
    facts = facts_of(
        kill,
        committed=kill.last_committed_step,
        restored="next committed step" if survived else "restored step",
        seconds="read back in" if survived else "state restored in",
        back="next step after" if survived else "training again after",
    )
    compared = f"{kill.comparison.rows:,} rows and all other state compared"
    if kill.exact:
        verdict = f"Exact: {compared}"
    else:
        why = f"{kill.comparison.wrong_rows} rows differ; " if kill.comparison.wrong_rows else ""
        why += f"differs: {', '.join(kill.comparison.wrong_names)}; " if kill.comparison.wrong_names else ""
        why += "" if kill.same_batches else "other batches than the uninterrupted run; "
        verdict = f"Not exact: {why}{compared}"
    return card(_title(kill), came_back, facts, exact=kill.exact, verdict=verdict)


def _title(kill: Kill) -> str:
    return {
        "trainer": "Trainer killed",
        "sidecar": "Sidecar killed mid-upload",
        "both + wipe": "Both killed, memory and cache wiped",
    }["sidecar" if kill.what.startswith("sidecar") else _short(kill)]


def _source_name(source: str) -> str:
    return {
        "cache": "the local cache; the sidecar had outlived it.",
        "store": "the store: nothing was left on the machine.",
    }.get(source, source)


def _encoding_name(encoding: str) -> str:
    return f"{encoding[1:]}-bit codes" if encoding.startswith("q") else encoding


def span(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(n: int) -> str:
    return {1: "once", 2: "two", 3: "three", 4: "four"}.get(n, str(n))
