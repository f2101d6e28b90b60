"""What a run shall do from now on: the one place where interval and precision are decided. Pure.

Now it is what the CheckpointPolicy says, with the workload's annotations before it; what measures failures and costs
decides here, too, once there is such a thing. A directive is given when the policy changed under a run: when what is
wanted differs from what the run's sidecars say is in force and from the directive they were given last. Of the two
timers, interval and steps, 0 turns one off while training runs; both off is no directive, so that nobody switches
saving off from afar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_operator.fleet.sidecar_report import PolicyInForce
from deltashard_operator.kube.cluster_name import POLICY
from deltashard_operator.policy import annotation as notes
from deltashard_operator.policy import workload_policy
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
    )


def differs(wanted: PolicyInForce, in_force: PolicyInForce) -> bool:
    """Whether a directive with `wanted` would change anything."""
    if wanted.timed and (wanted.every_s, wanted.every_steps) != (in_force.every_s, in_force.every_steps):
        return True
    return any(
        ask and ask != have
        for ask, have in (
            (wanted.encoding, in_force.encoding),
            (wanted.differential, in_force.differential),
        )
    )
