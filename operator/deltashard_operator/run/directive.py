"""What a run shall do from now on: the one place where its wishes become what its sidecars are told. Pure.

It is what the CheckpointPolicy says, with the workload's annotations before it: interval and precision themselves, or
what they are to be chosen for, and the bounds. The choosing is the sidecar's with rank 0, which measures what a save
costs. A directive is given when the policy changed under a run:
when what is wanted differs from what the run's sidecars say is in force and from the directive they were given last. Of
the two timers, interval and steps, 0 turns one off while training runs; both off is no directive, so that nobody
switches saving off from afar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_operator.fleet.sidecar_report import PolicyInForce
from deltashard_operator.kube.cluster_name import POLICY
from deltashard_operator.policy import annotation as notes
from deltashard_operator.policy import workload_policy
from deltashard_operator.policy.workload_policy import Policy
from deltashard_operator.run.observed_object import Wish


def decided(spec: Mapping[str, Any], defaults: Mapping[str, Any], wish: Wish) -> PolicyInForce:
    """What a run with these wishes shall do under a policy's spec; raises `Refusal` when it cannot be read."""
    said = notes.read({POLICY: wish.policy, **dict(wish.overrides)})
    policy = workload_policy.resolve(wish.policy, workload_policy.merged(spec, defaults), said)
    return PolicyInForce(
        every_s=policy.every_s,
        every_steps=policy.every_steps,
        encoding=policy.encoding,
        differential=policy.differential,
        **_choice(policy),
        tables=policy.tables,
    )


def _choice(policy: Policy) -> dict[str, Any]:
    """What is chosen, and within which bounds; nothing where nothing is."""
    found: dict[str, Any] = {}
    if policy.goal != workload_policy.FIXED:
        found |= {
            "goal": policy.goal,
            "least_s": policy.least_s,
            "most_s": policy.most_s,
        }
    if policy.bits_goal:
        found |= {
            "bits_goal": policy.bits_goal,
            "least_bits": policy.least_bits,
        }
    return found


def differs(wanted: PolicyInForce, in_force: PolicyInForce) -> bool:
    """Whether a directive with `wanted` would change anything."""
    if _interval(wanted) != _interval(in_force) or _bits(wanted) != _bits(in_force):
        return True
    # A chosen interval is in force, and only began as the policy says.
    if (
        wanted.timed
        and not wanted.chooses_interval
        and (wanted.every_s, wanted.every_steps) != (in_force.every_s, in_force.every_steps)
    ):
        return True
    return any(
        ask and ask != have
        for ask, have in (
            ("" if wanted.bits_goal else wanted.encoding, in_force.encoding),
            (wanted.differential, in_force.differential),
        )
    )


def _interval(policy: PolicyInForce) -> tuple[object, ...]:
    """How the interval is chosen; empty: it is not."""
    return (policy.goal, policy.least_s, policy.most_s) if policy.goal else ()


def _bits(policy: PolicyInForce) -> tuple[object, ...]:
    """How bits are chosen, if they are, and the user's own."""
    return (policy.bits_goal, policy.least_bits, policy.tables) if policy.bits_goal else (policy.tables,)
