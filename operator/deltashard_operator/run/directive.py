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

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_operator.api import annotation as notes
from deltashard_operator.api import workload_policy
from deltashard_operator.fleet.sidecar_report import KEPT, TIMERS, whole
from deltashard_operator.kube.cluster_name import POLICY
from deltashard_operator.run.observed_object import Wish


def decided(spec: Mapping[str, Any], defaults: Mapping[str, Any], wish: Wish) -> pb.Policy:
    """What a run with these wishes shall do under a policy's spec; raises `Refusal` when it cannot be read."""
    said = notes.read({POLICY: wish.policy, **dict(wish.overrides)})
    policy = workload_policy.resolve(wish.policy, workload_policy.merged(spec, defaults), said)
    return policy.saving


def differs(wanted: pb.Policy, in_force: pb.Policy) -> bool:
    """Whether a directive with `wanted` would change anything."""
    names = set(whole(wanted)) | {name for name in KEPT if getattr(wanted, name)}
    if wanted.goal:  # a chosen interval is in force, and only began as the policy says
        names -= set(TIMERS)
    if wanted.bits_goal:
        names.discard("encoding")
    return any(getattr(wanted, name) != getattr(in_force, name) for name in names)
