"""What interruptions came to: how often training was restored and lost steps, by cause. Pure.

Every interruption after which training was opened again is a **restore**; it is **lossy**, too, unless somebody wanted
it, or there was time for a save (an eviction) and the checkpoint that was restored is as far as training was told to
be. What is not known counts as lossy, and is taken back when a late word says otherwise. A crash loop counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deltashard_operator.run.failure import Interruption

MAX_NODES = 64
"""Nodes of a run whose failures are kept apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How often a cause interrupted training, and how often steps were lost with it."""

    restores: int = 0
    lossy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An interruption of which it is not known yet what was lost."""

    reached: int
    """Step that training was told to be at."""
    replayed: int | None = None
    """Steps that are trained again; None: nothing was restored yet."""
    doubted: str = ""
    """Cause under which it is counted as lossy already; empty: it is not over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """What is counted of a run's interruptions."""

    causes: Mapping[str, Times] = field(default_factory=dict)
    """Interruptions since the beginning, by `LossCause`; a crash loop is one."""
    pending: Mapping[str, Pending] = field(default_factory=dict)
    """By the part of the run, see `Loss.run`."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Failures by node, since this controller began; those of a crash loop are the script's."""


def lost(before: Incidents, part: str, step: int) -> Incidents:
    """After a part of the run was lost, when training was told to be at `step`."""
    known = before.pending.get(part)
    if known is not None and not known.doubted:
        return before
    return replace(before, pending={**before.pending, part: Pending(reached=step)})


def restored(before: Incidents, part: str, *, step: int, lost_steps: int) -> Incidents:
    """After a part of the run was restored to `step`, by its sidecar's word with `lost_steps` to be trained again."""
    known = before.pending.get(part)
    if known is None:
        return before
    replayed = max(lost_steps, known.reached - step, known.replayed or 0)
    if not known.doubted:
        return replace(before, pending={**before.pending, part: replace(known, replayed=replayed)})
    before = replace(before, pending={k: v for k, v in before.pending.items() if k != part})
    if replayed:
        return before
    times = before.causes[known.doubted]
    causes = {**before.causes, known.doubted: replace(times, lossy=max(times.lossy - 1, 0))}
    return replace(before, causes=causes)


def over(before: Incidents, part: str, interruptions: Iterable[Interruption]) -> Incidents:
    """After these interruptions of a part of the run, in order, are over."""
    for each in interruptions:
        before = _over(before, part, each)
    return before


def _over(before: Incidents, part: str, interruption: Interruption) -> Incidents:
    known = before.pending.get(part)
    pending = {key: value for key, value in before.pending.items() if key != part}
    if interruption.again:
        return replace(before, pending=pending)
    replayed = known.replayed if known is not None else None
    lossy = not interruption.asked and not (interruption.graceful and replayed == 0)
    if lossy and interruption.graceful and known is not None and replayed is None:
        pending[part] = replace(known, doubted=interruption.cause.value)
    times = before.causes.get(interruption.cause.value, Times())
    causes = {
        **before.causes,
        interruption.cause.value: Times(
            restores=times.restores + interruption.times, lossy=times.lossy + interruption.times * lossy
        ),
    }
    nodes = dict(before.nodes)
    for node in interruption.nodes:
        if node in nodes or len(nodes) < MAX_NODES:
            nodes[node] = nodes.get(node, 0) + interruption.times
    return Incidents(causes=causes, pending=pending, nodes=nodes)
