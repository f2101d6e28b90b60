# ruff: noqa: E501 - the page is prose
"""The page of the demo of several ranks: the events, and the step of each rank's rows after each event."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from events import NONE, PARTIAL, Event, ranks
from figures import PROCESS_COLOURS, STYLE, RunHistory, canvas, figures, svg
from matplotlib.figure import Figure
from report import DATA, card, cards, document, facts_of, render_tiles, span

_SHARD = re.compile(r"rank (\d+): (\w+)\[(\d+):(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Everything the page shows."""

    summary: dict[str, object]
    """out/demo-ranks.json."""
    store: str
    history: RunHistory
    events: list[Event]
    violations: list[str]
    took_s: float


def render(rank_report: RankReport) -> str:
    drawn = figures(rank_report.history)
    with mpl.rc_context(STYLE):
        drawn["shards"] = svg(_shards(rank_report.events))
    return _page(rank_report, drawn)


def _shards(happened: list[Event]) -> Figure:
    """Draw the largest table's rows after each event: their rank and their step."""
    drawn, axes = canvas(0.72 * len(happened) + 0.8)
    for line, event in enumerate(happened):
        pieces = [(_SHARD.fullmatch(name), step) for name, step in event.comparison.step_per_shard.items()]
        largest = max(
            (found for found, _ in pieces if found is not None),
            key=lambda found: int(found[4]) - int(found[3]),
        )[2]
        for found, step in pieces:
            if found is None or found[2] != largest:
                continue
            rank, first, stop = int(found[1]), int(found[3]), int(found[4])
            axes.barh(
                line,
                stop - first,
                left=first,
                color=PROCESS_COLOURS[rank % len(PROCESS_COLOURS)],
                edgecolor="white",
                height=0.62,
            )
            whose = "" if event.mode != PARTIAL else ", its own" if rank in event.kept else ", as saved"
            axes.text(
                (first + stop) / 2,
                line,
                f"rank {rank}: {'?' if step is None else f'step {step}'}{whose}",
                ha="center",
                va="center",
                color="white",
                fontsize=9.5,
            )
    axes.set_yticks(np.arange(len(happened)), [event.mark for event in happened])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(xlabel="rows of the table of pairs", xlim=(0, None))
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    return drawn


def _page(rank_report: RankReport, drawn: dict[str, str]) -> str:
    summary = rank_report.summary
    quality, stall = summary["quality"], summary["stall_ms"]
    assert isinstance(quality, dict)
    assert isinstance(stall, dict)
    worlds = [rank_report.events[0].world_before]
    worlds += [event.world_after for event in rank_report.events if event.world_after != event.world_before]
    twice = sum(event.lost_steps for event in rank_report.events)
    partial = [event for event in rank_report.events if event.mode == PARTIAL]
    pls = sum(event.pls for event in partial)
    headline = (
        f"{len(rank_report.events)} accidents on {' &rarr; '.join(map(str, worlds))} ranks, {twice} of {summary['steps']:,} steps done "
        f"twice, nothing lost{f' but {100 * pls:.2f} % of the samples, as was allowed' if partial else ''}"
        if not rank_report.violations
        else "Something was not as promised"
    )
    shards = sum(len(event.comparison.step_per_shard) for event in rank_report.events)
    tiles = [
        (f"{summary['checkpoints']}", "checkpoints, each of one step of all ranks"),
        (f"{shards}", "shards compared after the events, every bit of rows and optimizer state"),
        (
            f"{stall['p50']:.0f} ms",
            f"rank 0 stood still per checkpoint (median; longest {stall['max']:.0f} ms)",
        ),
        (
            f"{quality['with_events']:.4f}",
            f"AUC on held-out baskets; {quality['uninterrupted']:.4f} when nothing is saved and nothing happens",
        ),
    ]
    promised = "".join(
        f'<div class="verdict bad">{html.escape(message)}</div>' for message in rank_report.violations
    )
    body = f"""
<h1>{headline}</h1>
<p class="lead">{summary["ranks"]} processes under <code>torchrun</code> train one TorchRec model on real shopping baskets, its {summary["rows"]:,}
embedding rows spread over them. While they train, ranks and the sidecar are killed with <code>SIGKILL</code>, and the job is started
again with other numbers of ranks. Nobody tells the training script, and no person helps. From the last resize on recovery is
<em>partial</em> (CPR): who survives keeps the rows that it holds, only the lost rank's go back.</p>
{promised}
{render_tiles(tiles)}
{cards([_event_card(event) for event in rank_report.events])}
<section><h2>Which rank came back with which step's rows</h2>
<p>The largest table after each event. A step is written on a shard when its bytes are those of that step's checkpoint in the store,
whatever the rank says of itself. After the sidecar's death: what the next checkpoint holds. After partial recovery: the lost rank's are
the checkpoint's, a survivor's are those that it held when the rank died.</p>{drawn["shards"]}</section>
<section><h2>The run, second by second</h2>
<p>A line falls back where the ranks began again from the newest committed checkpoint; the steps in between are trained once more. Ranks
that are told to end save their last step first, so nothing is trained twice. The sidecar's death leaves no trace, and after partial
recovery training goes on where it was.</p>{drawn["progress"]}</section>
<section><h2>Loss across the events</h2>
<p>In grey the same training on {summary["ranks"]} ranks without checkpoints and without events. Until the first resize every step's
loss is the same: to the last bit. Other numbers of ranks see the same batches and draw other dropout. After partial recovery a part of
the rows lacks some steps, which is not exact and is not meant to be.</p>{drawn["loss"]}</section>
<section><h2>Bytes per checkpoint, of all ranks</h2>
<p>A full checkpoint is {rank_report.history.full_bytes / 1e6:.0f} MB. Rows are stored as fp32, so that steps that are trained twice can be compared bit for
bit; most checkpoints hold only the rows that changed. The first after a resize holds all.</p>{drawn["bytes"]}</section>
<div class="pair">
<section><h2>How long training stood still</h2><p>Rank 0, at each checkpoint.</p>{drawn["stall"]}</section>
<section><h2>How much could be lost</h2><p>Age of the newest committed checkpoint, measured at the store. Dotted: the
events.</p>{drawn["age"]}</section></div>
<footer>
<p><b>How &ldquo;exact&rdquo; is measured.</b> Right after <code>restore()</code>, and at each cut, every rank takes SHA-256 sums of its living tensors as
TorchRec shows them, past deltashard: each shard's rows and optimizer state, each dense parameter and its state. Another process reads the
checkpoint from the store (<code>deltashard.open_checkpoint</code>) and compares. All ranks must hold the newest checkpoint that the store's log
had when they took over, together all rows of every table, and go on with the step after it, on the batches of the uninterrupted run.</p>
<p><b>Partial recovery.</b> The checkpoint has to be what the lost rank comes back with, and only that one. Before, every rank wrote down the
sums of its shards after each fused update: a survivor must come back with its own last ones, and all with the dense half of the survivor
that was furthest. PLS, the portion of lost samples, is the sum over ranks of steps lost / planned steps &times; share of all rows; what the
ranks say is compared with the sum by hand, and the newest checkpoint carries it.</p>
<p>Store: {html.escape(rank_report.store)}. The whole demo took {rank_report.took_s:.0f} s. Numbers: <code>out/demo-ranks.json</code>. Again:
<code>make demo RANKS={summary["ranks"]}</code>.</p>
{DATA}
</footer>"""
    return document("deltashard demo, several ranks", body)


def _event_card(event: Event) -> str:
    if event.mode == PARTIAL:
        return _partial_card(event)
    survived = event.mode == NONE
    came_back = (
        "Training did not notice. The next checkpoint, read back from the store, holds what every rank cut."
        if survived
        else f"{ranks(event.world_after)} came back, from {'the local cache' if event.source == 'cache' else 'the store'}."
    )
    facts = facts_of(
        event,
        committed=event.committed_step,
        restored="next committed step" if survived else "restored step",
        seconds="read back in" if survived else "slowest rank restored in",
        back="next step after" if survived else "training again after",
    )
    return _card(event, came_back, facts, good="Exact", bad="Not exact")


def _partial_card(event: Event) -> str:
    came_back = f"{ranks(len(event.kept))} kept what they held; the lost one's rows came from the checkpoint."
    if event.comparison.ahead:
        came_back += f" Within the next step's update already: {', '.join(event.comparison.ahead)}."
    facts = [
        ("last step trained", f"{event.last_step:,}"),
        ("lost rank's rows: of step", f"{event.committed_step:,}"),
        ("all went on after step", f"{event.restored_step:,}"),
        ("portion of lost samples (PLS)", f"{event.pls:.4f}"),
        ("slowest rank restored in", f"{event.restore_s:.2f} s"),
        ("training again after", span(event.back_s)),
    ]
    return _card(event, came_back, facts, good="As promised, bit for bit", bad="Not as promised")


def _card(event: Event, came_back: str, facts: list[tuple[str, str]], *, good: str, bad: str) -> str:
    compared = f"{event.comparison.rows:,} rows on {ranks(event.world_after)} and all other state compared"
    wrong = "; ".join((*event.violations, *event.comparison.wrong))
    verdict = f"{good}: {compared}" if event.exact else f"{bad}: {wrong}; {compared}"
    return card(event.what[0].upper() + event.what[1:], came_back, facts, exact=event.exact, verdict=verdict)
