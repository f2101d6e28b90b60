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
        f"{count(len(demo_report.kills)).capitalize()} kills, {lost} of {summary['steps']:,} steps repeated, no saved state lost"
        if exact
        else "A restored state differs from the saved state"
    )
    tiles = [
        (
            f"{len(demo_report.history.seen)}",
            f"committed checkpoints in {summary['steps']:,} steps",
        ),
        (f"{summary['reduction']:.1f} &times;", "fewer bytes than full checkpoints of the same steps"),
        (
            f"{stall['p50']:.0f} ms",
            f"training stall per checkpoint (median; longest {stall['max']:.0f} ms)",
        ),
        (
            f"{quality['with_kills']:.4f}",
            f"AUC on held-out baskets; {quality['uninterrupted']:.4f} without checkpoints and kills",
        ),
    ]
    rows = sum(rows for rows, _ in demo_report.tables.values())
    columns = max(columns for _, columns in demo_report.tables.values())
    body = f"""
<h1>{headline}</h1>
<p class="lead">A recommendation model trains on real shopping baskets with {demo_report.item_count:,} articles: {rows:,} embedding rows
of {columns} numbers, {summary["steps"]:,} steps. During training its processes are killed with <code>SIGKILL</code>. A small
supervisor restarts them, as Kubernetes would. The training script is not notified.</p>
{render_tiles(tiles)}
{cards([_kill_card(kill) for kill in demo_report.kills])}
<section><h2>Training steps over time</h2>
<p>After a kill of the trainer, the line falls back to the newest committed checkpoint: the next process restores it and
repeats the steps since. A kill of the sidecar does not interrupt training, and the next checkpoint has the rows of the
lost one.</p>{figures["progress"]}</section>
<section><h2>Training loss</h2>
<p>Grey: the same training without checkpoints and kills. After each restart the model gets the same batches in the same
order with the same random draws. The curves differ only by the rounding of rows restored from
{html.escape(_encoding_name(demo_report.encoding))}.</p>{figures["loss"]}</section>
<section><h2>Bytes per checkpoint</h2>
<p>A full checkpoint of this state has {demo_report.history.full_bytes / 1e6:.0f} MB. deltashard stores rows in
{html.escape(_encoding_name(demo_report.encoding))} and all other state exactly. Most checkpoints contain only the rows that changed since
the last baseline (policy: {html.escape(demo_report.policy)}).</p>{figures["bytes"]}</section>
<div class="pair">
<section><h2>Training stall per checkpoint</h2><p>The trainer copies changed rows into shared memory. The sidecar encodes and
uploads them during training.</p>{figures["stall"]}</section>
<section><h2>Age of the newest checkpoint</h2><p>Time since the snapshot of the newest checkpoint that the store has. Dotted:
the kills.</p>{figures["age"]}</section></div>
<footer>
<p><b>Definition of &ldquo;exact&rdquo;.</b> At each snapshot and after each restore, the training script writes its live tensors to plain
files, without deltashard. Optimizer state and dense parameters must have the same bits. Every table row must equal, bit for bit,
the encoded and decoded row of the snapshot. Every step after a restart must get the batch of the uninterrupted run. The
last committed step is read from the log in the store. After the kill of the sidecar, a third process reads the next checkpoint from
the store alone.</p>
<p>Store: {html.escape(demo_report.store)}. The demo took {demo_report.took_s:.0f} s. Figures: <code>out/demo.json</code>. Repeat with
<code>make demo</code>, or with a MinIO server: <code>make demo STORE=minio</code>.</p>
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


def card(title: str, recovery: str, facts: list[tuple[str, str]], *, exact: bool, verdict: str) -> str:
    items = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    result = f'<div class="verdict {"good" if exact else "bad"}">{html.escape(verdict)}</div>'
    return f'<div class="kill"><h3>{html.escape(title)}</h3><p class="from">{recovery}</p><dl>{items}</dl>{result}</div>'


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
    recovery = (
        "Training continued. The next checkpoint in the store is complete."
        if survived
        else f"Training resumed from {html.escape(_source_name(kill.source))}"
    )
    facts = facts_of(
        kill,
        committed=kill.last_committed_step,
        restored="next committed step" if survived else "restored step",
        seconds="read from the store in" if survived else "state restored in",
        back="next step after" if survived else "training resumed after",
    )
    compared = f"{kill.comparison.rows:,} rows and all other state compared"
    if kill.exact:
        verdict = f"Exact: {compared}"
    else:
        why = f"{kill.comparison.wrong_rows} rows differ; " if kill.comparison.wrong_rows else ""
        why += f"differs: {', '.join(kill.comparison.wrong_names)}; " if kill.comparison.wrong_names else ""
        why += "" if kill.same_batches else "batches differ from the uninterrupted run; "
        verdict = f"Not exact: {why}{compared}"
    return card(_title(kill), recovery, facts, exact=kill.exact, verdict=verdict)


def _title(kill: Kill) -> str:
    return {
        "trainer": "Trainer killed",
        "sidecar": "Sidecar killed mid-upload",
        "both + wipe": "Both killed, memory and cache wiped",
    }["sidecar" if kill.what.startswith("sidecar") else _short(kill)]


def _source_name(source: str) -> str:
    return {
        "cache": "the local cache of the surviving sidecar.",
        "store": "the store: memory and cache were wiped.",
    }.get(source, source)


def _encoding_name(encoding: str) -> str:
    return f"{encoding[1:]}-bit codes" if encoding.startswith("q") else encoding


def span(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(n: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four"}.get(n, str(n))
