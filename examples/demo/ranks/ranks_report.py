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
            origin = "" if event.mode != PARTIAL else ", kept" if rank in event.kept else ", restored"
            axes.text(
                (first + stop) / 2,
                line,
                f"rank {rank}: {'?' if step is None else f'step {step}'}{origin}",
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
    repeated = sum(event.lost_steps for event in rank_report.events)
    partial = [event for event in rank_report.events if event.mode == PARTIAL]
    pls = sum(event.pls for event in partial)
    headline = (
        f"{len(rank_report.events)} events on {' &rarr; '.join(map(str, worlds))} ranks, {repeated} of {summary['steps']:,} steps "
        f"repeated{f', {100 * pls:.2f} % of the samples lost (within the PLS target)' if partial else ', no saved state lost'}"
        if not rank_report.violations
        else "A guarantee was violated"
    )
    shards = sum(len(event.comparison.step_per_shard) for event in rank_report.events)
    tiles = [
        (f"{summary['checkpoints']}", "checkpoints, each of one step of all ranks"),
        (f"{shards}", "shards compared after the events: all bits of rows and optimizer state"),
        (
            f"{stall['p50']:.0f} ms",
            f"stall of rank 0 per checkpoint (median; longest {stall['max']:.0f} ms)",
        ),
        (
            f"{quality['with_events']:.4f}",
            f"AUC on held-out baskets; {quality['uninterrupted']:.4f} without checkpoints and events",
        ),
    ]
    violations = "".join(
        f'<div class="verdict bad">{html.escape(message)}</div>' for message in rank_report.violations
    )
    body = f"""
<h1>{headline}</h1>
<p class="lead">{summary["ranks"]} processes under <code>torchrun</code> train one TorchRec model on real shopping baskets. Its {summary["rows"]:,}
embedding rows are sharded over them. During training, ranks and the sidecar are killed with <code>SIGKILL</code>, and the job restarts
with other numbers of ranks, without manual help. After the last resize, recovery is <em>partial</em> (CPR): survivors keep their rows,
and only the lost rank's rows are restored.</p>
{violations}
{render_tiles(tiles)}
{cards([_event_card(event) for event in rank_report.events])}
<section><h2>Rows of each rank after each event</h2>
<p>The largest table. The step on a shard is that of the checkpoint in the store with the same bytes; the ranks' reports are not used.
After the kill of the sidecar, the shards are those of the next checkpoint. After partial recovery, the lost rank has the checkpoint's
rows, and a survivor the rows that it had at the kill.</p>{drawn["shards"]}</section>
<section><h2>Training steps over time</h2>
<p>The line falls back where the ranks restored the newest committed checkpoint and repeated the steps since. Ranks save their last step
on SIGTERM, so a resize with SIGTERM repeats no step. The kill of the sidecar does not interrupt training. After partial recovery,
training continues at its last step.</p>{drawn["progress"]}</section>
<section><h2>Training loss</h2>
<p>Grey: the same training on {summary["ranks"]} ranks without checkpoints and events. Until the first resize the loss of every step has
the same bits. Other numbers of ranks get the same batches but draw other dropout. After partial recovery, the lost rank's rows lack some
steps, so the loss is not exact.</p>{drawn["loss"]}</section>
<section><h2>Bytes per checkpoint, of all ranks</h2>
<p>A full checkpoint has {rank_report.history.full_bytes / 1e6:.0f} MB. Rows are stored as fp32, so that repeated steps can be compared bit for bit.
Most checkpoints contain only the rows that changed. The first checkpoint after a resize contains all rows.</p>{drawn["bytes"]}</section>
<div class="pair">
<section><h2>Training stall per checkpoint</h2><p>Of rank 0.</p>{drawn["stall"]}</section>
<section><h2>Age of the newest checkpoint</h2><p>Time since the snapshot of the newest checkpoint that the store has. Dotted:
the events.</p>{drawn["age"]}</section></div>
<footer>
<p><b>Definition of &ldquo;exact&rdquo;.</b> After <code>restore()</code> and at each snapshot, every rank computes SHA-256 sums of its live tensors from
TorchRec's view, without deltashard: each shard's rows and optimizer state, each dense parameter and its state. Another process reads the
checkpoint from the store (<code>deltashard.open_checkpoint</code>) and compares. At takeover all ranks must have the newest checkpoint of the
store's log, and together all rows of every table. They must continue with the next step, on the batches of the uninterrupted run.</p>
<p><b>Partial recovery.</b> Only the lost rank may have the checkpoint's rows. Every rank records the sums of its shards after each fused
update. A survivor must have its last recorded shards, and all ranks the dense parameters of the survivor with the highest step. PLS, the
portion of lost samples, is the sum over ranks of steps lost / planned steps &times; share of all rows. The demo compares the PLS that the
ranks report, and that of the newest checkpoint, with this sum.</p>
<p>Store: {html.escape(rank_report.store)}. The demo took {rank_report.took_s:.0f} s. Figures: <code>out/demo-ranks.json</code>. Repeat with
<code>make demo RANKS={summary["ranks"]}</code>.</p>
{DATA}
</footer>"""
    return document("deltashard demo, several ranks", body)


def _event_card(event: Event) -> str:
    if event.mode == PARTIAL:
        return _partial_card(event)
    survived = event.mode == NONE
    recovery = (
        "Training continued. The next checkpoint in the store equals the snapshots of all ranks."
        if survived
        else f"{ranks(event.world_after)} restored from {'the local cache' if event.source == 'cache' else 'the store'}."
    )
    facts = facts_of(
        event,
        committed=event.committed_step,
        restored="next committed step" if survived else "restored step",
        seconds="read from the store in" if survived else "slowest rank restored in",
        back="next step after" if survived else "training resumed after",
    )
    return _card(event, recovery, facts, good="Exact", bad="Not exact")


def _partial_card(event: Event) -> str:
    recovery = (
        f"{ranks(len(event.kept))} kept their rows; the lost rank's rows were restored from the checkpoint."
    )
    if event.comparison.ahead:
        recovery += (
            f" These shards already had the update of the next step: {', '.join(event.comparison.ahead)}."
        )
    facts = [
        ("last step trained", f"{event.last_step:,}"),
        ("step of the lost rank's rows", f"{event.committed_step:,}"),
        ("all continued after step", f"{event.restored_step:,}"),
        ("portion of lost samples (PLS)", f"{event.pls:.4f}"),
        ("slowest rank restored in", f"{event.restore_s:.2f} s"),
        ("training resumed after", span(event.back_s)),
    ]
    return _card(event, recovery, facts, good="Correct, bit for bit", bad="Not correct")


def _card(event: Event, recovery: str, facts: list[tuple[str, str]], *, good: str, bad: str) -> str:
    compared = f"{event.comparison.rows:,} rows on {ranks(event.world_after)} and all other state compared"
    wrong = "; ".join((*event.violations, *event.comparison.wrong))
    verdict = f"{good}: {compared}" if event.exact else f"{bad}: {wrong}; {compared}"
    return card(event.what[0].upper() + event.what[1:], recovery, facts, exact=event.exact, verdict=verdict)
